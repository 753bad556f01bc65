"""Whole runs from Python, without a config file: what `vectorlm.reinforce` and `vectorlm.finetune` do."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from vectorlm.config.load import config_from_keywords
from vectorlm.config.schema import Config
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.preflight.checked import preflight
from vectorlm.preflight.local_model import with_download
from vectorlm.preflight.resume import find_resumption, say_finished
from vectorlm.ranks.launcher import launch
from vectorlm.ranks.placement import without_gc
from vectorlm.ranks.topology import Topology
from vectorlm.report.runs import read_lines

if TYPE_CHECKING:
    from vectorlm.train.recorder import OnStep

HELD_OUT = 0.05
"""Share of the rows that `finetune` evaluates on if it is given no `eval_dataset`."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its folder, its model and what it logged."""

    output_dir: Path

    @property
    def model(self) -> Path:
        """The folder of the trained model, which `SamplingEngine` and transformers load."""
        return self.output_dir / "final-model"

    @property
    def metrics(self) -> Any:
        """A row of numbers for each step: a data frame if pandas is installed, else a list of dictionaries."""
        return _table(self.output_dir / "metrics.jsonl")

    @property
    def rollouts(self) -> Any:
        """A row for each completion that reinforcement learning trained on, in the same form."""
        return _table(self.output_dir / "rollouts.jsonl")


def reinforce(
    model: str | os.PathLike[str],
    prompts: Any,
    rewards: Any,
    *,
    algorithm: str = "grpo",
    lr: float = 1e-6,
    prompts_per_step: int = 8,
    output_dir: str | os.PathLike[str] | None = None,
    world_size: int = 1,
    on_step: OnStep | None = None,
    **settings: Any,
) -> FinishedRun:
    """Train a model by rewards.

    >>> run = vectorlm.reinforce("Qwen/Qwen3-0.6B", ["2 + 2 = "], lambda text: float("4" in text),
    ...                          max_steps=10, max_seq_len=256, group_size=8)  # doctest: +SKIP

    Args:
        model: A folder, or a name on the Hugging Face Hub.
        prompts: What ``rl.prompts`` of a config may be; or in memory a list of texts, of conversations (lists of
            messages) or of rows with a ``prompt`` and the rewards' columns, or a ``datasets.Dataset`` of such rows.
        rewards: A function, a reward's name as in a config, several of them in a list, or a mapping from them to
            weights. Functions run in other processes, with what they refer to.
        algorithm: A row of docs/algorithms.md, or ``file.py:NAME``.
        lr: Learning rate.
        prompts_per_step: Prompts of a step, each with ``group_size`` completions.
        output_dir: Folder of the run; None makes a new one under ``runs``. An interrupted run resumes in its folder.
        world_size: Number of ranks.
        on_step: Called as ``on_step(step, metrics, rollouts)`` in the process of rank 0 after each step, with copies of
            the step's lines in ``metrics.jsonl`` (without the seconds of its phases) and ``rollouts.jsonl``. If it
            returns True, the run ends after this step as after its last one; if it raises, the run fails.
        **settings: Other settings of a config, by the last part of their name (``group_size=8``). If several settings
            have that name, it is the one nearest the top. Or whole sections
            (``train_parameters={"optimizer": {"lr": 1e-6}}``).

    Raises:
        ConfigError: A setting is unknown or wrong; lists them all.
        RankFailed: Training failed on a rank.
    """
    folder = _folder(output_dir, algorithm)
    given = {
        "model": os.fspath(model),
        "output_dir": str(folder),
        "algorithm": algorithm,
        "lr": lr,
        "prompts_per_step": prompts_per_step,
        "rl": {
            **settings.pop("rl", {}),
            "prompts": _prompts(prompts, folder),
            "rewards": _rewards(rewards, folder),
        },
    }
    start(with_download(config_from_keywords({**settings, **given}, "rl")), world_size, on_step)
    return FinishedRun(folder)


def finetune(
    model: str | os.PathLike[str],
    dataset: Any,
    eval_dataset: Any = None,
    *,
    lr: float = 2e-5,
    output_dir: str | os.PathLike[str] | None = None,
    world_size: int = 1,
    on_step: OnStep | None = None,
    **settings: Any,
) -> FinishedRun:
    """Train a model on texts or chats.

    >>> run = vectorlm.finetune("Qwen/Qwen3-0.6B", [{"messages": chat} for chat in chats], max_seq_len=1024,
    ...                         dataset_preprocess={"assistant_only_loss": True})  # doctest: +SKIP

    Args:
        model: A folder, or a name on the Hugging Face Hub.
        dataset: Rows with ``messages``, ``prompt`` and ``completion``, or ``text``: a list of dictionaries, a
            ``datasets.Dataset``, or what ``dataset_preprocess.load_path`` of a config may be.
        eval_dataset: Rows for the held-out loss; None takes one of 20 rows out of a `dataset` in memory, and measures
            none where it is not in memory.
        lr: Learning rate.
        output_dir: As for `reinforce`.
        world_size: Number of ranks.
        on_step: As for `reinforce`, without rollouts: the last argument is empty.
        **settings: As for `reinforce`; ``dataset_preprocess={…}`` says how texts are tokenised.

    Raises:
        ConfigError: A setting is unknown or wrong; lists them all.
        DatasetError: The rows cannot be tokenised.
        RankFailed: Training failed on a rank.
    """
    from vectorlm.data.preprocess import preprocess
    from vectorlm.train.load import load_tokenizer

    folder = _folder(output_dir, "finetune")
    rows = {"train": dataset, "eval": eval_dataset}
    if eval_dataset is None and isinstance(dataset, str | os.PathLike):
        rows = {"train": dataset}
    elif eval_dataset is None:
        halves = _as_dataset(dataset).train_test_split(test_size=HELD_OUT, seed=0)
        rows = {"train": halves["train"], "eval": halves["test"]}
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
    config = with_download(config_from_keywords({**settings, **given}, "train_parameters"))
    tokenizer, how = load_tokenizer(config.model), config.dataset_preprocess
    assert how is not None
    for part, each in rows.items():
        target = folder / "data" / part
        if (target / "state.json").exists():
            continue  # The run was ended, and goes on.
        source = each
        if not isinstance(each, str | os.PathLike):
            source = folder / "data" / f"{part}-rows"
            _as_dataset(each).save_to_disk(source)
        asked = replace(how, load_path=os.fspath(source), save_path=str(target))
        preprocess(asked, tokenizer, config.train_parameters.max_seq_len)
    start(config, world_size, on_step)
    return FinishedRun(folder)


def start(config: Config, world_size: int, on_step: OnStep | None = None) -> str | None:
    """Check a config, then train on every rank: by rewards if it has a section ``rl``, else on a dataset.

    Under torchrun or srun, which decide the number of ranks, rank 0 checks for all.

    Args:
        config: As `with_download` returns it.
        world_size: Number of ranks.
        on_step: As for `reinforce`.

    Returns:
        What to tell the user if an earlier run has already finished here; else None.

    Raises:
        ConfigError: As `preflight`.
        RankFailed: Training failed on a rank.
    """
    num_started = Topology.from_environment().world_size
    checked = None if num_started > 1 else preflight(config, world_size)
    found = find_resumption(config, max(world_size, num_started)) if checked is None else checked.resumption
    if found is not None and found.is_finished:
        return say_finished(config, found)
    with without_gc():
        from vectorlm.rl_run import reinforce as by_rewards
        from vectorlm.sft_run import finetune as on_dataset

    on_rank: Callable[..., None] = on_dataset if config.rl is None else by_rewards
    launch(partial(on_rank, on_step=on_step), checked or config, world_size=world_size)
    return None


def _folder(output_dir: str | os.PathLike[str] | None, name: str) -> Path:
    if output_dir is None:
        Path("runs").mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{name.rpartition(':')[2]}-", dir="runs"))
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _prompts(prompts: Any, folder: Path) -> Any:
    """Return what a config can say of prompts; those in memory are saved in the run's folder."""
    if isinstance(prompts, str | os.PathLike | Mapping):
        return os.fspath(prompts) if isinstance(prompts, os.PathLike) else prompts
    rows = prompts if hasattr(prompts, "save_to_disk") else [_row(each) for each in prompts]
    path = folder / "prompts.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return str(path)


def _row(prompt: Any) -> Mapping[str, Any]:
    if isinstance(prompt, Mapping):
        return prompt
    if not isinstance(prompt, str | Sequence):
        raise DatasetError(
            f"a prompt is a {type(prompt).__name__}: use a text, a list of messages, or a row."
        )
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}


def _rewards(rewards: Any, folder: Path) -> Mapping[str, Any]:
    """Return the weight of each reward by its name; functions are pickled into the run's folder."""
    if not isinstance(rewards, Mapping):
        rewards = dict.fromkeys(rewards if isinstance(rewards, list | tuple) else [rewards], 1.0)
    path = folder / "functions.pkl"
    named: dict[str, Any] = {}
    functions: dict[str, Callable[..., Any]] = {}
    for reward, weight in rewards.items():
        name = reward
        if not isinstance(reward, str):
            name = getattr(reward, "__name__", "")
            if not callable(reward):
                raise ConfigError(
                    f"a reward is a {type(reward).__name__}: use a function, or the name of a reward."
                )
            if not name.isidentifier() or name in functions:
                name = f"reward_{len(functions)}"
            functions[name] = reward
            name = f"{path}:{name}"
        named[name] = weight
    if functions:
        path.write_bytes(cloudpickle.dumps(functions))
    return named


def _as_dataset(rows: Any) -> Any:
    from datasets import Dataset

    return rows if hasattr(rows, "save_to_disk") else Dataset.from_list(list(rows))


def _table(path: Path) -> Any:
    lines = list(read_lines(path))
    try:
        import pandas
    except ImportError:
        return lines
    return pandas.DataFrame(lines)
