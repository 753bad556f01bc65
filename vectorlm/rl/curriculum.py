"""A curriculum: how difficult prompts are, which follows the scores of what was answered."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vectorlm.rl.rollout import RolloutGroup
from vectorlm.settings import CurriculumSettings
from vectorlm.types import PromptRecord

SCORE = "reasoning_gym"
"""The reward whose mean decides."""


class Levelled(Protocol):
    """Prompts that there are in several levels of difficulty, as many of each."""

    @property
    def level(self) -> int | None:
        """Return the level of these."""
        ...

    @property
    def num_levels(self) -> int:
        """Return how many levels there are."""
        ...

    def at_level(self, level: int) -> Sequence[PromptRecord]:
        """Return the prompts of a level; each has the column ``level``."""
        ...


class Curriculum:
    """Keeps the level, and from which position of the run each level holds: a position never changes its prompt."""

    def __init__(self, prompts: Levelled, settings: CurriculumSettings) -> None:
        """Begin with the level of `prompts`."""
        self._prompts, self._settings = prompts, settings
        self._begins = [(0, prompts.level or 0)]
        self._scores: list[float] = []
        """Of the newest groups of the level."""

    @property
    def level(self) -> int:
        """The level of the prompts that are asked next."""
        return self._begins[-1][1]

    def at(self, position: int) -> Sequence[PromptRecord]:
        """Return the prompts of the level that holds at a position of the run."""
        level = next(level for start, level in reversed(self._begins) if start <= position)
        return self._prompts.at_level(level)

    def observe(self, groups: Sequence[RolloutGroup], position: int) -> None:
        """Take the groups of a step; another level begins at `position`, from which on nothing has been asked."""
        for group in groups:
            score = group.rewards_by_name[SCORE].nanmean().item()
            # Stored groups, and those that were begun before the level, say nothing of it.
            is_of_level = group.rollouts[0].prompt_record.columns.get("level") == self.level
            if is_of_level and not group.rollouts[0].is_replayed and score == score:
                self._scores.append(score)
        self._scores = self._scores[-self._settings.num_groups :]
        if len(self._scores) < self._settings.num_groups:
            return
        mean = statistics.fmean(self._scores)
        step = int(mean >= self._settings.rise_above) - int(mean <= self._settings.fall_below)
        level = min(max(self.level + step, 0), self._prompts.num_levels - 1)
        if level != self.level:
            self._begins.append((position, level))
            self._scores = []

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"begins": list(self._begins), "scores": list(self._scores)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned."""
        self._begins = [(start, level) for start, level in state["begins"]]
        self._scores = list(state["scores"])
