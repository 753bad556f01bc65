"""The tasks of reasoning-gym as prompts, each made from its index and the seed when it is asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, overload

from vectorlm.errors import DatasetError
from vectorlm.packages import is_installed
from vectorlm.settings import PromptSettings, nearest
from vectorlm.types import PromptRecord

COMPOSITE = "composite"
TRAIN_SIZE, HELD_OUT_SIZE = 10_000, 100
HELD_OUT_SEED = 2**30
"""Far from what is trained on: item i is made with seed + i."""
NUM_SAMPLED = 8
"""Items that are looked at before a run starts."""
BY_HASH = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Tasks (0.1.25) whose items depend on the order of sets, which differs between processes without PYTHONHASHSEED."""


@dataclass(frozen=True)
class Tasks(Sequence[PromptRecord]):
    """Items of a task, or of several; nothing of them is kept.

    The same index, settings and level make the same item, in every process.
    """

    task: str
    """The name of a task, or `composite`."""
    size: int
    seed: int
    config: Mapping[str, Any] = field(default_factory=dict)
    level: int | None = None
    """The difficulty by reasoning-gym's curricula; None for the task's own defaults."""
    system_prompt: str | None = None
    is_chat: bool = True

    @classmethod
    def of(cls, settings: PromptSettings, setting: str, *, is_held_out: bool) -> Tasks:
        """Return what the settings describe; `setting` is their name in an error.

        Raises:
            DatasetError: There is no such task, level or argument, or no reasoning-gym.
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
            for each in range(tasks.num_levels) if settings.curriculum is not None else ():
                tasks.at_level(each)[0]
            tasks.sample()
        # Of the task's code; its own rules are assertions.
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
        """Make items, with the columns ``item``, for the reward `reasoning_gym`, and ``answer``."""
        if isinstance(index, slice):
            return [self[each] for each in range(self.size)[index]]
        item = self._dataset[range(self.size)[index]]
        columns = {"item": item, "answer": item["answer"]}
        if self.level is not None:
            columns["level"] = self.level
        if not self.is_chat:
            return PromptRecord("\n\n".join(filter(None, (self.system_prompt, item["question"]))), columns)
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        return PromptRecord([*system, {"role": "user", "content": item["question"]}], columns)

    @property
    def num_levels(self) -> int:
        """How many levels of difficulty there are; 0 without a curriculum."""
        return max(map(_num_levels, self._names), default=0)

    @property
    def seeds(self) -> range:
        """What items are made with; `composite` gives each of its tasks the next seed."""
        return range(self.seed, self.seed + self.size + len(self._parts))

    def at_level(self, level: int) -> Tasks:
        """Return the same tasks at another difficulty."""
        return replace(self, level=level)

    def sample(self) -> list[PromptRecord]:
        """Return a few items from everywhere."""
        return self[:: -(-self.size // NUM_SAMPLED)]

    def shares_items_with(self, other: Tasks) -> bool:
        """Whether an item of the one may be an item of the other."""
        apart = self.seeds.stop <= other.seeds.start or other.seeds.stop <= self.seeds.start
        return not apart and not set(self._names).isdisjoint(other._names)

    def require_known(self) -> None:
        """Raise `DatasetError` for what is not there, with the name that is most like it."""
        from reasoning_gym.factory import DATASETS

        if self.task == COMPOSITE and not self._parts:
            raise DatasetError("its config has no `datasets`: list them with `name`, `weight` and `config`.")
        for name in self._names:
            if name not in DATASETS or (name == COMPOSITE != self.task):
                fix = nearest(name, DATASETS) or "reasoning_gym.factory.DATASETS has their names."
                raise DatasetError(f"there is no task {name!r}. {fix}")
        parts = ((each["name"], each.get("config", {})) for each in self._parts)
        for name, config in ((self.task, self.config), *parts):
            known = [each.name for each in fields(DATASETS[name][1]) if each.name not in ("seed", "size")]
            if wrong := [each for each in config if each not in known]:
                fix = nearest(wrong[0], known) or f"It has {', '.join(known)}."
                raise DatasetError(f"the task {name!r} has no setting {wrong[0]!r} in its config. {fix}")
        by_hash = [each for each in self._names if each in BY_HASH]
        if by_hash and "PYTHONHASHSEED" not in os.environ:
            raise DatasetError(
                f"the items of {by_hash[0]!r} depend on Python's hash seed, which differs between processes. Start the "
                "run with PYTHONHASHSEED=0 in its environment."
            )
        if self.level is not None and self.level >= self.num_levels:
            has = f"has the levels 0 to {self.num_levels - 1}" if self.num_levels else "has no curriculum"
            raise DatasetError(f"level {self.level} is not there: it {has}.")

    @property
    def _parts(self) -> Sequence[Mapping[str, Any]]:
        return self.config.get("datasets", ()) if self.task == COMPOSITE else ()

    @property
    def _names(self) -> list[str]:
        return [each["name"] for each in self._parts] if self.task == COMPOSITE else [self.task]

    @property
    def _dataset(self) -> Any:
        # As text, which can be a key, and so that what travels to the ranks is the settings alone.
        return _dataset(self.task, json.dumps(self.config), self.size, self.seed, self.level)


@cache
def _dataset(task: str, config_text: str, size: int, seed: int, level: int | None) -> Any:
    """Return reasoning-gym's own dataset, which makes items when they are asked for."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import create_dataset

    config = json.loads(config_text)
    if task == COMPOSITE:
        parts = []
        for each in config["datasets"]:
            own = _of_level(each["name"], level) | each.get("config", {})
            parts.append(DatasetSpec(each["name"], each.get("weight", 1.0), own))
        config = {"datasets": parts}
    else:
        config = _of_level(task, level) | config
    return create_dataset(task, **config, seed=seed, size=size)


def _of_level(task: str, level: int | None) -> dict[str, Any]:
    """Return the settings that the task's curriculum has at a level; none without."""
    curriculum = _curriculum(task)
    if level is None or curriculum is None:
        return {}
    curriculum.set_global_level(level)
    names = []
    for each in curriculum.attributes.values():
        is_range = hasattr(each, "upper_field_name")
        names += [each.lower_field_name, each.upper_field_name] if is_range else [each.field_name]
    settings = curriculum.generate_configuration()
    return {name: getattr(settings, name) for name in names}


def _num_levels(task: str) -> int:
    curriculum = _curriculum(task)
    return 0 if curriculum is None else max(len(each.levels) for each in curriculum.attributes.values())


def _curriculum(task: str) -> Any:
    from reasoning_gym.factory import create_curriculum, has_curriculum

    return create_curriculum(task) if has_curriculum(task) else None


def read_taskset(settings: PromptSettings, setting: str) -> list[PromptRecord]:
    """Load the tasks that the settings select, each with what its episode is played from.

    Raises:
        DatasetError: There is no such taskset, its config is wrong, it has no end, or verifiers is not installed.
    """
    if not is_installed("verifiers"):
        fix = "Run `pip install --no-deps -r requirements/verifiers.txt`, beside the pinned packages."
        raise DatasetError(f"{setting} needs the package verifiers. {fix}")
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.utils.loaders import load_taskset

    named = f"{setting}.verifiers={settings.verifiers!r}"
    config = dict(settings.config)
    try:
        select = SelectConfig.model_validate(config.pop("select", {}))
        taskset = load_taskset(environment_config(str(settings.verifiers), config).taskset).select(select)
        if not taskset.bounded:
            raise DatasetError("it has no end. Set `config: {select: {limit: 1000}}`.")
        tasks = [task.data for task in taskset]
    # Of the taskset's code too.
    except Exception as error:
        text = str(error) if isinstance(error, DatasetError) else f"{type(error).__name__}: {error}"
        raise DatasetError(f"{named} cannot be loaded: {text}") from error
    row = {"taskset": settings.verifiers, "config": config}
    return [PromptRecord(data.prompt_text, {**row, "task": data.model_dump(mode="json")}) for data in tasks]


def environment_config(taskset: str, config: Mapping[str, Any]) -> Any:
    """Return verifiers' own config of an environment; agents run as processes of this machine, without a tunnel."""
    from verifiers.v1.utils.loaders import resolve_env_config

    agent = {"runtime": {"type": "subprocess"}, **config.get("agent", {})}
    return resolve_env_config(
        {**config, "taskset": {**config.get("taskset", {}), "id": taskset}, "agent": agent}
    )
