"""Decide whether a config can resume from the checkpoints in its output_dir, and list the changes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vectorlm.data.settings import PromptSettings
from vectorlm.errors import CheckpointError
from vectorlm.packages import versions_of_rank
from vectorlm.plugin import file_of
from vectorlm.report.runs import flat
from vectorlm.rl.environments.environment import AGENT
from vectorlm.rl.rewards.registry import without_arguments
from vectorlm.runs.config.schema import Config
from vectorlm.runs.config.setting import all_settings, to_plain
from vectorlm.runs.config.value import show
from vectorlm.train.checkpoint.folder import newest
from vectorlm.train.lora import ADAPTER_CONFIG
from vectorlm.train.optimizers import OPTIMIZERS

FIXED = (
    "train_parameters.seed",
    "train_parameters.freeze",
    "train_parameters.lora_peft_config",
    "train_parameters.optimizer.amsgrad",
    "train_parameters.optimizer.arguments",
    "train_parameters.optimizer.name",
    "train_parameters.quantization",
    "preference.loss",
    "rl.algorithm.name",
    "rl.critic.model",
    "rl.keep_adapters",
    "rl.num_epochs",
    "rl.num_mini_batches",
    "rl.reference_sync_every",
    "rl.rollout.source",
)
"""Settings that decide the tensors of a checkpoint, the order of the data, or the count of optimizer steps."""
OUTPUTS = (
    "evaluation.output_jsonl_path",
    "trackers.",
    "wandb_config.",
    "callbacks",
    "push_to_hub",
)
"""Prefixes of settings for outputs of rank 0."""
DESCRIPTIONS = ("config.json", ADAPTER_CONFIG)
"""The files that describe a model, or adapters."""
NUM_PIECES, PIECE_BYTES = 64, 4096
"""Number and size of the pieces of a weight file in its digest. Reading 10 GB would take a minute, and the weights of
two models differ everywhere."""
REWARDS = re.compile(r"rl\.(sources\.[^.]*\.)?rewards\.")
"""Prefix of settings whose keys are rewards."""
SECTION = "section that trains"
STOPS_EARLY = tuple(
    f"train_parameters.{name}"
    for name in ("early_stopping_patience", "early_stopping_min_delta", "best_metric", "best_metric_mode")
)
"""Settings that decide whether a run that stopped early continues."""


@dataclass(frozen=True)
class Resumption:
    """The newest checkpoint of a run, which it resumes from."""

    step: int
    changes: tuple[str, ...]
    """Settings that have changed, such as ``train_parameters.epochs=4 (was 2)``."""
    is_finished: bool
    """Whether the run is over: the checkpoint is of the last step, and the model was exported."""
    stopped_early: bool = False
    """Whether the run ended because training no longer improved."""


def identity_of(config: Config, world_size: int, num_examples: int | None = None) -> dict[str, Any]:
    """Return the description of a run that a checkpoint stores, as JSON values; `num_examples` counts training rows."""
    train, text, rl = config.train_parameters, config.dataset, config.rl
    adapters = None if train.adapters is None else _model_digest(Path(train.adapters))
    contents = {"model": _model_digest(Path(config.model)), "train_parameters.adapters": adapters}
    fixed: dict[str, Any] = {}
    if rl is not None:
        for name, source in rl.by_source.items():
            path = source.prompts.path if isinstance(source.prompts, PromptSettings) else None
            contents[f"rl.sources.{name}.prompts" if name else "rl.prompts"] = _digest(path or source.prompts)
        if rl.sft is not None:
            contents["rl.sft.dataset"] = _fingerprint(Path(rl.sft.dataset))
    elif text is not None:
        contents |= {"dataset.train_ds": _fingerprint(Path(text.train_ds))}
        fixed["global batch"] = config.rows_per_step(world_size)
        fixed["rows of dataset.train_ds"] = num_examples
        for section in ("reward_model", "preference"):
            if getattr(config, section) is not None:
                fixed[SECTION] = section
    optimizer = train.optimizer.name
    if optimizer in OPTIMIZERS and OPTIMIZERS[optimizer].per_rank_blocks:
        fixed[f"number of ranks ({optimizer} keeps each rank's shard in separate blocks)"] = world_size
    settings = {**_settings(config), "world_size": world_size}
    identity = {"settings": settings, "contents": contents, "fixed": fixed}
    return json.loads(json.dumps(identity))


def settings_of_rank(config: Config) -> dict[str, Any]:
    """Return the values that must be equal on all ranks: settings, digests of their files, and package versions."""
    settings = _settings(config)
    named = {
        path: content_of(file_of(path.removeprefix(AGENT)))
        for name, value in settings.items()
        if not name.startswith(OUTPUTS)
        # Rewards are keys.
        for path in map(without_arguments, (REWARDS.sub("", name), *_texts(value)))
        if path
    }
    contents = {f"content of {name}": content for name, content in named.items() if content is not None}
    return {**settings, **contents, **versions_of_rank()}


def find_resumption(config: Config, world_size: int, num_examples: int | None = None) -> Resumption | None:
    """Return the checkpoint in output_dir that this run resumes from; None if there is no checkpoint.

    Raises:
        CheckpointError: The checkpoint cannot be read, or belongs to a run that this config cannot resume.
    """
    path = Path(config.train_parameters.output_dir) / "checkpoints"
    found = newest(path) if config.train_parameters.checkpointing_enabled else None
    if found is None:
        return None
    now = identity_of(config, world_size, num_examples)
    if "contents" not in found.identity:
        raise CheckpointError(f"{found.path} was written by an earlier version of vectorlm. Delete {path}.")
    refused, changes = _compare(found.identity, now)
    if refused:
        final = path.with_name("final-model")
        ways = _ways_to_restore_batch(config, world_size, found.identity)
        restore = f"Restore it with {' or '.join(ways)}" if ways else "Restore it"
        start = f": a run there may start from these weights with model={final}" if final.is_dir() else ""
        raise CheckpointError(
            f"cannot resume from {found.path}: {'; '.join(refused)}. The weights of the checkpoint and its place in "
            f"the data depend on this. {restore}, or choose another output_dir{start}. To start over, delete {path}."
        )
    length = _length_setting(config)
    before = found.identity["settings"]
    num_steps = now["settings"][length]
    if num_steps is None:  # The steps of epochs are not known before the prompts are read.
        is_same = all(change.startswith(f"{length}=") for change in changes)
        num_steps = before[length] if is_same else math.inf
    is_over = num_steps <= before[length]
    if found.stopped_early:
        # A longer run would stop again at its next evaluation.
        patience, old = (of["settings"].get(STOPS_EARLY[0]) or math.inf for of in (now, found.identity))
        is_over = patience <= old and all(
            now["settings"].get(key) == before.get(key) for key in STOPS_EARLY[1:]
        )
    return Resumption(found.step, tuple(changes), found.is_finished and is_over, found.stopped_early)


def say_finished(config: Config, found: Resumption) -> str:
    """Return a message that the run is over, with the way to train longer."""
    output = config.train_parameters.output_dir
    setting = STOPS_EARLY[0] if found.stopped_early else _length_setting(config)
    return (
        f"{output} {'stopped early' if found.stopped_early else 'is finished'} at step {found.step}; its model is "
        f"{output}/final-model. To train longer, raise {setting}; to start over, delete {output}/checkpoints."
    )


def _length_setting(config: Config) -> str:
    """Return the setting for the length of a run."""
    return "train_parameters.epochs" if config.rl is None else "rl.max_steps"


def _compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the differences that prevent resumption, and the other differences."""
    refused: list[str] = []
    changes: list[str] = []
    for name in sorted(before["settings"].keys() | now["settings"].keys()):
        # Versions without the setting worked as its default does.
        old, new = before["settings"].get(name, _default(name)), now["settings"].get(name)
        if old != new:
            is_fixed = any(name == fixed_name or name.startswith(f"{fixed_name}.") for fixed_name in FIXED)
            (refused if is_fixed else changes).append(f"{name}={show(new)} (was {show(old)})")
    for name, new in now["contents"].items():
        if new != before["contents"].get(name):
            is_start = name in ("model", "train_parameters.adapters")
            (refused if is_start else changes).append(f"the content of {name} has changed")
    # A run whose config lacks the section has no such key.
    for name in sorted(now["fixed"].keys() | before["fixed"].keys() & {SECTION}):
        old, new = (of["fixed"].get(name, "none") for of in (before, now))
        # `vectorlm check` counts no rows.
        if new is not None and new != old:
            product = " (ranks with different rows x train_bs x gradient_accumulation_steps)"
            more = product if name == "global batch" else ""
            refused.append(f"{name}={new}{more} (was {old})")
    return refused, changes


def _ways_to_restore_batch(config: Config, world_size: int, before: Mapping[str, Any]) -> list[str]:
    """Return the settings that each restore a checkpoint's global batch, if it has changed."""
    old, name = before["fixed"].get("global batch"), "train_parameters.gradient_accumulation_steps"
    if old is None or config.dataset is None or old == (now := config.rows_per_step(world_size)):
        return []
    num_ranks = before["settings"].get("world_size", world_size)
    rows = now // config.train_parameters.loop.gradient_accumulation_steps
    # The first way repairs a forgotten --world_size.
    ways = [f"world_size={num_ranks}"] if config.rows_per_step(num_ranks) == old else []
    return [*ways, f"{name}={old // rows}"] if old % rows == 0 else ways


def _default(name: str) -> Any:
    """Return a setting's default as a JSON value; None if it has no default or is a section."""
    setting = all_settings().get(name)
    is_plain = setting is not None and not setting.is_required and setting.section is None
    return json.loads(json.dumps(setting.default)) if setting is not None and is_plain else None


def _settings(config: Config) -> dict[str, Any]:
    settings = dict(flat(to_plain(config)))
    # A run may move to another folder or machine.
    del settings["train_parameters.output_dir"]
    return settings


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a setting's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def content_of(name: str) -> Any:
    """Return a digest of a model, a saved dataset or a file; None for any other path."""
    if os.path.isfile(name):  # Not `Path.is_file`, which raises for long texts.
        return _digest(name)
    is_model = any(os.path.isfile(os.path.join(name, file)) for file in DESCRIPTIONS)
    return _model_digest(Path(name)) if is_model else _fingerprint(Path(name))


def _model_digest(folder: Path) -> str:
    """Return a digest of a model: its description, and the size and some bytes of its weight files."""
    files = sorted(path for path in folder.glob("*") if path.suffix in (".safetensors", ".bin"))
    parts: list[Any] = [_digest(str(path)) for name in DESCRIPTIONS if (path := folder / name).is_file()]
    for path in files:
        size = path.stat().st_size
        parts.append((path.name, size))
        with path.open("rb") as file:
            for index in range(NUM_PIECES):
                file.seek(index * max(size - PIECE_BYTES, 0) // (NUM_PIECES - 1))
                parts.append(file.read(PIECE_BYTES))
    return _digest(parts)


def _fingerprint(dataset: Path) -> Any:
    """Return the fingerprint that the datasets library saved with a dataset, or with each split; None without one."""
    try:
        if (splits := dataset / "dataset_dict.json").is_file():
            names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
            return {name: _fingerprint(dataset / name) for name in names}
        return json.loads((dataset / "state.json").read_text(encoding="utf-8"))["_fingerprint"]
    except (OSError, ValueError, KeyError):
        return None


def _digest(source: Any) -> str:
    """Return a digest of a file's content, of a saved dataset's fingerprint, or of any other value."""
    digest = hashlib.blake2b(digest_size=8)
    path = Path(source) if isinstance(source, str) else None
    if path is not None and path.is_file():
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    else:
        digest.update(repr(_fingerprint(path) if path is not None and path.is_dir() else source).encode())
    return digest.hexdigest()
