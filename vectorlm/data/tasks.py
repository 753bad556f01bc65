"""Prompts from reasoning-gym, made on demand from an index and the seed, and from verifiers' tasksets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, overload

from vectorlm.data.settings import PromptSettings
from vectorlm.errors import DatasetError
from vectorlm.packages import is_installed
from vectorlm.settings import nearest
from vectorlm.types import PromptRecord

COMPOSITE = "composite"
TRAIN_SIZE, HELD_OUT_SIZE = 10_000, 100
HELD_OUT_SEED = 2**30
"""Default seed of held-out items; far from the training seeds, because item i is made with seed + i."""
NUM_SAMPLED = 8
"""Number of items that are checked before a run starts."""
BY_HASH = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Tasks of reasoning-gym 0.1.25 whose items depend on the order of sets: all processes need one PYTHONHASHSEED."""


@dataclass(frozen=True)
class Tasks(Sequence[PromptRecord]):
    """Items of one or several tasks, made on demand.

    The same index, settings and level give the same item in every process.
    """

    task: str
    """The name of a task, or `composite`."""
    size: int
    seed: int
    config: Mapping[str, Any] = field(default_factory=dict)
    level: int | None = None
    """Difficulty by reasoning-gym's curricula; None for the task's defaults."""
    system_prompt: str | None = None
    is_chat: bool = True

    @classmethod
    def of(cls, settings: PromptSettings, setting: str, *, is_held_out: bool) -> Tasks:
        """Make the tasks of the settings; `setting` is their name in errors.

        Raises:
            DatasetError: There is no such task, level or argument, or reasoning-gym is not installed.
        """
        if not is_installed("reasoning_gym"):
            raise DatasetError(
                f"{setting} needs the package reasoning_gym. Run `pip install 'vectorlm[rewards]'`."
            )
        from reasoning_gym.utils import SYSTEM_PROMPTS

        assert settings.reasoning_gym is not None
        level = settings.level
        if settings.curriculum is not None and level is None:
            level = 0
        tasks = cls(
            settings.reasoning_gym,
            settings.size or (HELD_OUT_SIZE if is_held_out else TRAIN_SIZE),
            settings.seed if settings.seed is not None else HELD_OUT_SEED if is_held_out else 0,
            settings.config,
            level,
            settings.system_prompt and SYSTEM_PROMPTS.get(settings.system_prompt, settings.system_prompt),
            settings.form == "chat",
        )
        try:
            tasks.require_known()
            # A level may contradict the task's other settings.
            for number in range(tasks.num_levels) if settings.curriculum is not None else ():
                tasks.at_level(number)[0]
            tasks.sample()
        # The task's code may raise any exception; it checks its settings with assertions.
        except Exception as error:
            text = str(error) if isinstance(error, DatasetError) else f"{type(error).__name__}: {error}"
            raise DatasetError(f"{setting}.reasoning_gym={tasks.task!r} cannot be made: {text}") from error
        return tasks

    def __len__(self) -> int:
        """Return the number of items."""
        return self.size

    @overload
    def __getitem__(self, index: int) -> PromptRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptRecord]: ...
    def __getitem__(self, index: int | slice) -> PromptRecord | list[PromptRecord]:
        """Make items, with the columns ``item`` (for the reward `reasoning_gym`) and ``answer``.

        ``item["config"]`` holds the settings of the item's task that are not the defaults, because its scorer may read
        them.
        """
        if isinstance(index, slice):
            return [self[place] for place in range(self.size)[index]]
        item = self._dataset[range(self.size)[index]]
        configs = _configs(self.task, json.dumps(self.config), self.level)
        if config := configs[item["metadata"]["source_dataset"]]:
            item = {**item, "config": config}
        columns = {"item": item, "answer": item["answer"]}
        if self.level is not None:
            columns["level"] = self.level
        if not self.is_chat:
            return PromptRecord("\n\n".join(filter(None, (self.system_prompt, item["question"]))), columns)
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        return PromptRecord([*system, {"role": "user", "content": item["question"]}], columns)

    @property
    def num_levels(self) -> int:
        """Number of levels of difficulty; 0 without a curriculum."""
        curricula = filter(None, map(_curriculum, self._names))
        levels = (attribute.levels for found in curricula for attribute in found.attributes.values())
        return max(map(len, levels), default=0)

    @property
    def seeds(self) -> range:
        """Seeds of the items; `composite` gives each of its tasks the next seed."""
        return range(self.seed, self.seed + self.size + len(self._parts))

    def at_level(self, level: int) -> Tasks:
        """Return the same tasks at another difficulty."""
        return replace(self, level=level)

    def sample(self) -> list[PromptRecord]:
        """Return a few items, spread over all."""
        return self[:: -(-self.size // NUM_SAMPLED)]

    def shares_items_with(self, other: Tasks) -> bool:
        """Return whether the two may have items in common."""
        apart = self.seeds.stop <= other.seeds.start or other.seeds.stop <= self.seeds.start
        return not apart and not set(self._names).isdisjoint(other._names)

    def require_known(self) -> None:
        """Raise `DatasetError` for an unknown task, setting or level, with the most similar name."""
        from reasoning_gym.factory import DATASETS

        if self.task == COMPOSITE and not self._parts:
            raise DatasetError("its config has no `datasets`: list them with `name`, `weight` and `config`.")
        for name in self._names:
            if name not in DATASETS or (name == COMPOSITE != self.task):
                fix = nearest(name, DATASETS) or "reasoning_gym.factory.DATASETS has their names."
                raise DatasetError(f"there is no task {name!r}. {fix}")
        parts = ((part["name"], part.get("config", {})) for part in self._parts)
        for name, config in ((self.task, self.config), *parts):
            known = [item.name for item in fields(DATASETS[name][1]) if item.name not in ("seed", "size")]
            if wrong := [key for key in config if key not in known]:
                fix = nearest(wrong[0], known) or f"It has {', '.join(known)}."
                raise DatasetError(f"the task {name!r} has no setting {wrong[0]!r} in its config. {fix}")
        by_hash = [name for name in self._names if name in BY_HASH]
        if by_hash and "PYTHONHASHSEED" not in os.environ:
            raise DatasetError(
                f"the items of {by_hash[0]!r} depend on Python's hash seed, which must be equal in all processes. "
                "Start the run with PYTHONHASHSEED=0 in its environment."
            )
        if self.level is not None and self.level >= self.num_levels:
            has = f"has the levels 0 to {self.num_levels - 1}" if self.num_levels else "has no curriculum"
            raise DatasetError(f"level {self.level} does not exist: the task {has}.")

    @property
    def _parts(self) -> Sequence[Mapping[str, Any]]:
        return self.config.get("datasets", ()) if self.task == COMPOSITE else ()

    @property
    def _names(self) -> list[str]:
        return [part["name"] for part in self._parts] if self.task == COMPOSITE else [self.task]

    @property
    def _dataset(self) -> Any:
        # Cached by text keys, outside of `Tasks`: only the settings are sent to the ranks.
        return _dataset(self.task, json.dumps(self.config), self.size, self.seed, self.level)


@cache
def _dataset(task: str, config_text: str, size: int, seed: int, level: int | None) -> Any:
    """Return reasoning-gym's dataset, which makes items on demand."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import create_dataset

    configs = _configs(task, config_text, level)
    if task != COMPOSITE:
        return create_dataset(task, **configs[task], seed=seed, size=size)
    parts = [
        DatasetSpec(part["name"], part.get("weight", 1.0), configs[part["name"]])
        for part in json.loads(config_text)["datasets"]
    ]
    return create_dataset(task, datasets=parts, seed=seed, size=size)


@cache
def _configs(task: str, config_text: str, level: int | None) -> dict[str, dict[str, Any]]:
    """Return the settings of the task at a level, or of each task of a composite, by name."""
    config = json.loads(config_text)
    parts = config["datasets"] if task == COMPOSITE else [{"name": task, "config": config}]
    return {part["name"]: _of_level(part["name"], level) | part.get("config", {}) for part in parts}


def _of_level(task: str, level: int | None) -> dict[str, Any]:
    """Return the settings of a task's curriculum at a level; empty without a curriculum or a level."""
    curriculum = _curriculum(task)
    if level is None or curriculum is None:
        return {}
    curriculum.set_global_level(level)
    names = []
    for attribute in curriculum.attributes.values():
        is_range = hasattr(attribute, "upper_field_name")
        names += (
            [attribute.lower_field_name, attribute.upper_field_name] if is_range else [attribute.field_name]
        )
    settings = curriculum.generate_configuration()
    return {name: getattr(settings, name) for name in names}


def _curriculum(task: str) -> Any:
    from reasoning_gym.factory import create_curriculum, has_curriculum

    return create_curriculum(task) if has_curriculum(task) else None


TASK_COLUMNS = {"taskset", "config", "task"}
"""Columns of tasks of verifiers, which its agent reads."""


def read_taskset(settings: PromptSettings, setting: str) -> list[PromptRecord]:
    """Load the tasks that the settings select, with the columns for verifiers' environment.

    Raises:
        DatasetError: There is no such taskset, its config is wrong, it is infinite, or verifiers is not installed.
    """
    if not is_installed("verifiers"):
        fix = "Run `pip install --no-deps -r requirements/verifiers.txt` after the pinned packages."
        raise DatasetError(f"{setting} needs the package verifiers. {fix}")
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.utils.loaders import load_taskset

    named = f"{setting}.verifiers={settings.verifiers!r}"
    config = dict(settings.config)
    try:
        select = SelectConfig.model_validate(config.pop("select", {}))
        taskset = load_taskset(environment_config(str(settings.verifiers), config).taskset).select(select)
        if not taskset.bounded:
            raise DatasetError("it is infinite. Set `config: {select: {limit: 1000}}`.")
        tasks = [task.data for task in taskset]
    # The taskset's code may raise any exception.
    except Exception as error:
        text = str(error) if isinstance(error, DatasetError) else f"{type(error).__name__}: {error}"
        raise DatasetError(f"{named} cannot be loaded: {text}") from error
    row = {"taskset": settings.verifiers, "config": config}
    return [PromptRecord(data.prompt_text, {**row, "task": data.model_dump(mode="json")}) for data in tasks]


def environment_config(taskset: str, config: Mapping[str, Any]) -> Any:
    """Return verifiers' config of an environment; agents run as local processes, without a tunnel."""
    from verifiers.v1.utils.loaders import resolve_env_config

    agent = {"runtime": {"type": "subprocess"}, **config.get("agent", {})}
    return resolve_env_config(
        {**config, "taskset": {**config.get("taskset", {}), "id": taskset}, "agent": agent}
    )
