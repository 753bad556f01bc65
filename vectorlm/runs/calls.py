"""Run training from Python, without a config file: `vectorlm.reinforce` and `vectorlm.finetune`."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import cloudpickle

from vectorlm.data.prompts import longest_prompt, read_prompts, without_added_nulls
from vectorlm.data.settings import in_full
from vectorlm.errors import ConfigError, DatasetError, RankFailed
from vectorlm.packages import fields_of
from vectorlm.ranks.launcher import launch
from vectorlm.ranks.topology import Topology, without_gc
from vectorlm.report.runs import read_lines
from vectorlm.runs.config.load import config_from_keywords
from vectorlm.runs.config.schema import Config
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.preflight.local_model import description_of, own_length, with_download
from vectorlm.runs.preflight.resume import content_of, find_resumption, say_finished
from vectorlm.runs.preflight.sampling import answer_tokens
from vectorlm.settings import as_path
from vectorlm.train.checkpoint.folder import locked, steps_in

HELD_OUT = 0.05
"""Share of the rows that `finetune` evaluates on without an `eval_dataset`."""
TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the files in a model's folder that may describe its tokenizer."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its folder, its model and its logs."""

    output_dir: Path

    @property
    def model(self) -> Path:
        """Folder of the trained model. `SamplingEngine` and transformers can load it."""
        return self.output_dir / "final-model"

    @property
    def metrics(self) -> Any:
        """Metrics by step: a data frame if pandas is installed, else a list of dictionaries."""
        return _table(self.output_dir / "metrics.jsonl")

    @property
    def rollouts(self) -> Any:
        """The completions that reinforcement learning trained on, in the same form."""
        return _table(self.output_dir / "rollouts.jsonl")


def reinforce(
    model: str | os.PathLike[str],
    prompts: Any,
    rewards: Any,
    *,
    algorithm: str = "grpo",
    lr: float = 1e-6,
    prompts_per_step: int = 8,
    group_size: int = 8,
    output_dir: str | os.PathLike[str] | None = None,
    world_size: int = 1,
    callbacks: Sequence[Any] = (),
    **settings: Any,
) -> FinishedRun:
    """Train a model with rewards.

    >>> run = vectorlm.reinforce("Qwen/Qwen3-0.6B", ["2 + 2 = "], lambda text: float("4" in text),
    ...                          max_tokens=64, temperature=0.8)  # doctest: +SKIP

    Args:
        model: A folder, or a name on the Hugging Face Hub.
        prompts: Any value of ``rl.prompts`` in a config; or prompts in memory: a list of texts, of conversations (lists
            of messages) or of rows with a ``prompt`` and the rewards' columns. Rows may also be a ``datasets.Dataset``
            or a data frame.
        rewards: A function, or the name of a reward as in a config; a list of them; or a mapping from them to weights.
            Functions run in other processes, together with the objects that they use.
        algorithm: A row of docs/algorithms.md, or ``file.py:NAME``.
        lr: Learning rate.
        prompts_per_step: Prompts per step.
        group_size: Completions that the engine samples for every prompt.
        output_dir: Folder of the run; None makes a new one under ``runs``. With ``checkpointing_enabled=True``, an
            interrupted run resumes in its folder.
        world_size: Number of ranks.
        callbacks: Objects with any of the methods ``on_step(run, step, metrics)``, ``on_rollouts(run, step,
            rollouts)``, ``on_evaluation(run, step, metrics)`` and ``on_checkpoint(run, step, folder)``, called on
            rank 0. ``run`` is a `RunControl`. If a callback raises, the run fails.
        **settings: Sampling parameters of vLLM (``max_tokens=64``), and other settings of a config, by the last part
            of their name (``kl_coef=0.01``). If several settings share that name, the one nearest to the top of the
            config is set. You can also pass whole sections: ``engine={"max_num_seqs": 64}`` passes arguments to vLLM's
            engine, and ``evaluation={"prompts": rows, "every": 10}`` evaluates on held-out prompts, perhaps in memory.
            ``max_seq_len`` is by default the longest prompt plus ``max_tokens``, at most the model's limit;
            ``max_steps`` is by default one pass over the prompts.

    Raises:
        ConfigError: Settings are unknown or wrong. The error lists all of them.
        DatasetError: `prompts` has no usable rows.
        RankFailed: Training failed on a rank.
    """
    folder = _folder(output_dir, algorithm)
    given: dict[str, Any] = {
        "model": os.fspath(model),
        "output_dir": str(folder),
        "algorithm": algorithm,
        "lr": lr,
        "prompts_per_step": prompts_per_step,
        "group_size": group_size,
        "rl": {
            **settings.pop("rl", {}),
            "prompts": _prompts(prompts, folder, "prompts"),
            "rewards": _rewards(rewards, folder),
        },
    }
    settings |= _held_out(settings.get("evaluation"), folder)
    known = fields_of("sampling_params.py", "SamplingParams") - {"seed"}  # The seed is the run's.
    if sampling := {name: settings.pop(name) for name in sorted(known & settings.keys())}:
        given["sampling_params"] = {**settings.pop("sampling_params", {}), **sampling}
    sections = given["rl"], settings.get("train_parameters", {})
    has_steps = any(
        name in settings or name in sections[0] for name in ("max_steps", "num_epochs_over_prompts")
    )
    has_length = "max_seq_len" in settings or "max_seq_len" in sections[1]
    # The length is a placeholder that a config accepts.
    defaults = ({} if has_steps else {"num_epochs_over_prompts": 1}) | (
        {} if has_length else {"max_seq_len": 1}
    )
    config = with_download(config_from_keywords({**settings, **given, **defaults}, "rl"))
    if not has_length:
        config = _with_length(config, _tokens_needed(config))
    start(config, world_size, callbacks)
    return FinishedRun(folder)


def _tokens_needed(config: Config) -> int:
    """Return the number of tokens of the longest prompt and its completion, in training and in evaluation."""
    rl = config.rl
    assert rl is not None
    assert rl.collect.prompts is not None
    records = read_prompts(rl.collect.prompts, "prompts", is_held_out=False)
    prompts, max_tokens = in_full(rl.collect.prompts), rl.collect.sampling["max_tokens"]
    if rl.collect.environment_of("") is not None or getattr(prompts, "curriculum", None) is not None:
        raise ConfigError(
            "max_seq_len: environments and curricula have rollouts of any length. Set max_seq_len to the longest."
        )
    if type(max_tokens) is not int:
        raise ConfigError(
            f"max_tokens={max_tokens!r}: max_seq_len has a default only if max_tokens is an integer. Set it."
        )
    from vectorlm.train.load import load_tokenizer

    tokenizer = load_tokenizer(config.model, config.chat)
    needed = max_tokens + longest_prompt(records, tokenizer, "prompts")
    if config.evaluation.prompts is not None:
        held_out = read_prompts(config.evaluation.prompts, "evaluation.prompts")
        longest = longest_prompt(held_out, tokenizer, "evaluation.prompts")
        needed = max(needed, longest + answer_tokens(config.evaluation.sampling_params))
    return needed


def _with_length(config: Config, num_tokens: int) -> Config:
    limit = own_length(description_of(Path(config.model)) or {}) or num_tokens
    train = replace(config.train_parameters, max_seq_len=min(num_tokens, limit))
    notes = tuple(note for note in config.notes if not note.startswith("max_seq_len"))
    return replace(config, train_parameters=train, notes=notes)


def finetune(
    model: str | os.PathLike[str],
    dataset: Any,
    eval_dataset: Any = None,
    *,
    lr: float = 2e-5,
    output_dir: str | os.PathLike[str] | None = None,
    world_size: int = 1,
    callbacks: Sequence[Any] = (),
    **settings: Any,
) -> FinishedRun:
    """Train a model on texts or chats.

    >>> run = vectorlm.finetune("Qwen/Qwen3-0.6B", [{"messages": chat} for chat in chats], max_seq_len=1024,
    ...                         dataset_preprocess={"assistant_only_loss": True})  # doctest: +SKIP

    Args:
        model: A folder, or a name on the Hugging Face Hub.
        dataset: Rows with ``messages``, ``prompt`` and ``completion``, or ``text``: a list of dictionaries, of texts or
            of conversations, a mapping of columns, a ``datasets.Dataset``, a data frame, or any
            value of ``dataset_preprocess.load_path`` in a config.
        eval_dataset: Rows for the held-out loss. None holds out one in 20 rows of a `dataset` in memory, and measures
            no held-out loss if `dataset` is a path or a single row.
        lr: Learning rate.
        output_dir: See `reinforce`.
        world_size: Number of ranks.
        callbacks: See `reinforce`; fine-tuning does not call ``on_rollouts``.
        **settings: See `reinforce`; ``dataset_preprocess={…}`` sets how texts are tokenised. ``max_seq_len`` is by
            default the longest row, at most the model's limit.

    Raises:
        ConfigError: Settings are unknown or wrong. The error lists all of them.
        DatasetError: The rows cannot be tokenised.
        RankFailed: Training failed on a rank.
    """
    folder = _folder(output_dir, "finetune")
    rows = {"train": _rows_of(dataset, "dataset", "text", "messages")}
    if eval_dataset is not None:
        rows["eval"] = _rows_of(eval_dataset, "eval_dataset", "text", "messages")
    elif not isinstance(rows["train"], str) and len(rows["train"]) > 1:
        rows["train"], rows["eval"] = _split(rows["train"])
    paths = {"load_path": str(folder / "data"), "save_path": str(folder / "data")}
    given = {
        "model": os.fspath(model),
        "output_dir": str(folder),
        "lr": lr,
        "dataset": {
            "train_bs": 1,
            **({"eval_bs": 1} if "eval" in rows else {}),
            **settings.pop("dataset", {}),
            **{f"{part}_ds": str(folder / "data" / part) for part in rows},
        },
        "dataset_preprocess": {**settings.pop("dataset_preprocess", {}), **paths},
    }
    has_length = "max_seq_len" in settings or "max_seq_len" in settings.get("train_parameters", {})
    if not has_length:
        given["max_seq_len"] = -1
    config = with_download(config_from_keywords({**settings, **given}, "train_parameters"))
    longest = _preprocess_parts(config, rows, folder / "data")
    if not has_length:
        config = _with_length(config, longest)
    start(config, world_size, callbacks)
    return FinishedRun(folder)


def _preprocess_parts(config: Config, rows: Mapping[str, Any], folder: Path) -> int:
    """Tokenise the rows of every part into `folder`, and return the length of the longest row in tokens."""
    from vectorlm.data.preprocess import preprocess
    from vectorlm.data.source import load_saved
    from vectorlm.data.summary import Summary
    from vectorlm.train.load import load_tokenizer

    tokenizer, how, longest = load_tokenizer(config.model, config.chat), config.dataset_preprocess, 0
    max_seq_len = config.train_parameters.max_seq_len
    assert how is not None
    # Merges, special tokens and the sizes of images decide the rows too, besides the vocabulary.
    files = sorted(file for file in Path(config.model).iterdir() if file.suffix in TOKENIZER_SUFFIXES)
    tokenizer_digests = [(file.name, content_of(str(file))) for file in files]
    for part, source in rows.items():
        target, note = folder / part, folder / f"{part}.digest"
        settings = replace(how, load_path=_saved(source, folder / f"{part}-rows"), save_path=str(target))
        source_digest, template = _digest(settings.load_path), tokenizer.chat_template
        variables = config.chat.chat_template_kwargs
        made_of = repr((settings, max_seq_len, tokenizer_digests, template, variables, source_digest))
        digest = hashlib.sha256(made_of.encode(errors="replace")).hexdigest()
        # Reuse the rows of an earlier call only if this call would make the same rows.
        if not ((target / "state.json").exists() and note.exists() and note.read_text() == digest):
            # If this process is killed, no note may describe other rows.
            note.unlink(missing_ok=True)
            preprocess(settings, tokenizer, max_seq_len)
            note.write_text(digest)
        summary = Summary.read(load_saved(target, part))
        longest = max(longest, 0 if summary is None else summary.longest)
    return longest


def start(config: Config, world_size: int, callbacks: Sequence[Any] = ()) -> str | None:
    """Check a config, then train on every rank: with rewards if it has a section ``rl``, else on a dataset.

    torchrun and srun decide the number of ranks themselves; rank 0 then checks the config.

    Args:
        config: A config from `with_download`.
        world_size: Number of ranks.
        callbacks: See `reinforce`.

    Returns:
        A message for the user if the run in this folder has finished already; else None.

    Raises:
        ConfigError: See `preflight`.
        RankFailed: Training failed on a rank.
    """
    if not isinstance(callbacks, list | tuple):
        raise ConfigError(f"callbacks={callbacks!r} must be a list. Write callbacks=[…].")
    if callbacks:  # This imports torch.
        from vectorlm.train.callbacks import require_callback

        for callback in callbacks:
            require_callback(callback)
    num_started = Topology.from_environment().world_size
    checked = None if num_started > 1 else preflight(config, world_size)
    found = find_resumption(config, max(world_size, num_started)) if checked is None else checked.resumption
    if found is not None and found.is_finished:
        return say_finished(config, found)
    with without_gc():
        from vectorlm.runs.fine_tuning import finetune as on_dataset
        from vectorlm.runs.reinforcement import reinforce as by_rewards

    on_rank: Callable[..., None] = on_dataset if config.rl is None else by_rewards
    try:
        launch(partial(on_rank, callbacks=callbacks), checked or config, world_size=world_size)
    except (RankFailed, KeyboardInterrupt) as error:
        train = config.train_parameters
        steps = steps_in(Path(train.output_dir) / "checkpoints") if train.checkpointing_enabled else []
        if steps:
            error.add_note(f"The same command resumes from step {steps[-1]}.")
        elif isinstance(error, KeyboardInterrupt):
            error.add_note("There is no checkpoint to resume from: the same command starts over.")
        raise
    return None


def _folder(output_dir: str | os.PathLike[str] | None, name: str) -> Path:
    if output_dir is None:
        Path("runs").mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{name.rpartition(':')[2]}-", dir="runs"))
    folder = Path(as_path(os.fspath(output_dir), "output_dir"))
    folder.mkdir(parents=True, exist_ok=True)
    if Topology.from_environment().is_main:
        # The files that the caller writes belong to the run in this folder.
        with locked(folder):
            pass
    return folder


def _prompts(prompts: Any, folder: Path, setting: str) -> Any:
    """Return a value of `rl.prompts` or `evaluation.prompts`; prompts in memory are saved to the run's folder."""
    if isinstance(prompts, Mapping) and not hasattr(prompts, "save_to_disk"):
        return prompts
    rows = _rows_of(prompts, setting, "prompt", "prompt")
    columns = [] if isinstance(rows, str) else [rows.column_names] if hasattr(rows, "column_names") else rows
    for index, names in enumerate(columns):
        if "prompt" not in names:
            found = ", ".join(map(str, names)) or "nothing"
            raise DatasetError(
                f"{setting}[{index}] must have a 'prompt', but has {found}. Rename its column."
            )
    return _saved(rows, folder / setting.replace(".", "_"), keeps_tables=False)


def _held_out(evaluation: Any, folder: Path) -> dict[str, Any]:
    """Return the section `evaluation` with the path of its prompts; nothing if it has no prompts."""
    if not isinstance(evaluation, Mapping) or evaluation.get("prompts") is None:
        return {}
    return {
        "evaluation": {
            **evaluation,
            "prompts": _prompts(evaluation["prompts"], folder, "evaluation.prompts"),
        }
    }


def _rows_of(given: Any, argument: str, text_name: str, list_name: str) -> Any:
    """Return the rows of an argument: a list of mappings, a ``datasets.Dataset``, or a path as it is.

    Raises:
        DatasetError: There are no rows, or one of them has the wrong type.
    """
    use = "Use a path, or a list of rows, of texts or of lists of messages."
    if isinstance(given, str | os.PathLike):
        return os.fspath(given)
    if isinstance(given, Mapping) and hasattr(given, "save_to_disk"):
        raise DatasetError(
            f"{argument} must be one split, not the splits {', '.join(given)}. Pass {argument}[{next(iter(given))!r}]."
        )
    if hasattr(given, "to_dict") and hasattr(
        given, "columns"
    ):  # a data frame, in which missing cells are NaN
        records = given.to_dicts() if hasattr(given, "to_dicts") else given.to_dict("records")
        given = [{str(name): cell for name, cell in row.items() if not _is_missing(cell)} for row in records]
    elif isinstance(given, Mapping):
        lengths = {name: len(column) for name, column in given.items() if isinstance(column, list | tuple)}
        if len(lengths) < len(given) or len(set(lengths.values())) > 1:
            raise DatasetError(f"{argument} must have columns that are lists of equal length. {use}")
        given = [dict(zip(given, cells, strict=True)) for cells in zip(*given.values(), strict=True)]
    elif not hasattr(given, "save_to_disk"):
        if isinstance(given, bytes) or not isinstance(given, Iterable):
            raise DatasetError(f"{argument} cannot be of type {type(given).__name__}. {use}")
        given = list(given)
        for index, row in enumerate(given):
            if isinstance(row, str):
                given[index] = {text_name: row}
            elif isinstance(row, Sequence) and not isinstance(row, bytes):
                given[index] = {list_name: list(row)}
            elif not isinstance(row, Mapping):
                raise DatasetError(f"{argument}[{index}] cannot be of type {type(row).__name__}. {use}")
    if not len(given):
        raise DatasetError(f"{argument} must have at least one row.")
    return given


def _is_missing(cell: Any) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell)) or str(cell) in ("NaT", "<NA>")


def _split(rows: Any) -> tuple[Any, Any]:
    """Split rows in memory into training and held-out rows; the split depends only on their number."""
    from datasets import Dataset

    if hasattr(rows, "save_to_disk"):
        parts = rows.train_test_split(test_size=HELD_OUT, seed=0)
        return parts["train"], parts["test"]
    places = Dataset.from_dict({"index": range(len(rows))})
    parts = places.train_test_split(test_size=HELD_OUT, seed=0)
    train, held_out = ([rows[index] for index in parts[name]["index"]] for name in ("train", "test"))
    return train, held_out


def _saved(rows: Any, path: Path, *, keeps_tables: bool = True) -> str:
    """Write rows in memory to a JSONL file, or a ``datasets.Dataset`` to a folder if `keeps_tables`; return the path.

    In a JSONL file the keys of rows may differ.
    """
    if isinstance(rows, str):
        return rows
    path.parent.mkdir(parents=True, exist_ok=True)
    if hasattr(rows, "save_to_disk"):
        if keeps_tables:
            rows.save_to_disk(path)
            return str(path)
        rows = map(without_added_nulls, rows)
    path = path.with_suffix(".jsonl")
    text = "".join(json.dumps(row, ensure_ascii=False, default=_as_json) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return str(path)


def _as_json(value: Any) -> Any:
    """Convert a date to text, and numbers and arrays of numpy to Python's."""
    for name in ("isoformat", "tolist"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise DatasetError(
        f"a row cannot hold a value of type {type(value).__name__}. Use texts, numbers, lists and dictionaries."
    )


def _digest(source: str) -> Any:
    """Return a digest of a file or a saved dataset, or the names, sizes and times of the files in a folder."""
    if (content := content_of(source)) is not None:
        return content
    pattern = os.path.join(glob.escape(source), "**") if os.path.isdir(source) else source
    files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(name)]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _rewards(rewards: Any, folder: Path) -> Mapping[str, Any]:
    """Return the weights of rewards by name; functions are pickled to the run's folder."""
    if not isinstance(rewards, Mapping):
        rewards = dict.fromkeys(rewards if isinstance(rewards, list | tuple) else [rewards], 1.0)
    path = folder / "functions.pkl"
    named: dict[str, Any] = {}
    functions: dict[str, Callable[..., Any]] = {}
    taken = {getattr(reward, "__name__", "") for reward in rewards}
    for reward, weight in rewards.items():
        name = reward
        if not isinstance(reward, str):
            name = getattr(reward, "__name__", "")
            if not callable(reward):
                raise ConfigError(
                    f"rewards cannot hold a value of type {type(reward).__name__}. Use functions or names of rewards."
                )
            if not name.isidentifier() or name in functions:
                name = next(new for i in count(len(functions)) if (new := f"reward_{i}") not in taken)
                taken.add(name)
            functions[name] = reward
            name = f"{path}:{name}"
        named[name] = weight
    if functions:
        path.write_bytes(cloudpickle.dumps(functions))
    return named


def _table(path: Path) -> Any:
    lines = list(read_lines(path))
    try:
        import pandas
    except ImportError:
        return lines
    return pandas.DataFrame(lines)
