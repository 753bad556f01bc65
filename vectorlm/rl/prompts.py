"""The order of a run's prompts, of one source or several, and of stored groups; and how difficult they are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from vectorlm.data.loader import StepLoader
from vectorlm.rl.rollout import RolloutGroup
from vectorlm.rl.settings import SFTSettings
from vectorlm.settings import CurriculumSettings
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.objective import NextTokens, known_rows
from vectorlm.types import Batch, PromptRecord

Item = TypeVar("Item")
SCORE = "reasoning_gym"
"""The reward whose mean decides on the level of a curriculum."""


class PromptOrder(Generic[Item]):
    """Walks through prompts, or anything else, in a new order on each pass, drawn from the seed.

    The only state is `position`: a run that resumes sets it.
    """

    def __init__(self, items: Sequence[Item], seed: int) -> None:
        """Take at least one item, and a seed of at least 0."""
        self._items, self._seed = items, seed
        self.position = 0
        self._order: tuple[int, np.ndarray] | None = None

    def take(self, count: int) -> list[Item]:
        """Return the next items; after the end of a pass the next pass begins."""
        taken = [self.at(self.position + index) for index in range(count)]
        self.position += count
        return taken

    def at(self, position: int) -> Item:
        """Return the item at any position of the run."""
        epoch, index = divmod(position, len(self._items))
        if self._order is None or self._order[0] != epoch:
            # The pair is hashed: seed + epoch would give one seed's second pass another seed's first.
            generator = np.random.default_rng((self._seed, epoch))
            self._order = epoch, generator.permutation(len(self._items))
        return self._items[self._order[1][index]]


class Levelled(Protocol):
    """Prompts that there are in several levels of difficulty, as many of each."""

    @property
    def level(self) -> int | None:
        """Return the level of these."""

    @property
    def num_levels(self) -> int:
        """Return how many levels there are."""

    def at_level(self, level: int) -> Sequence[PromptRecord]:
        """Return the prompts of a level; each has the column ``level``."""


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


class PromptMixture:
    """Walks through several sources of prompts, each in an order of its own, as `PromptOrder` does.

    Of the first n positions, each source has its share of n, but for less than one prompt for each source. The only
    state is `position`, besides that of the curricula.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[PromptRecord]],
        seed: int,
        shares: Mapping[str, float],
        curricula: Mapping[str, Curriculum],
    ) -> None:
        """Take prompts, shares that add up to 1, and curricula by the names of the sources, which the prompts get."""
        self._sources, self._shares, self._curricula = sources, shares, curricula
        self._orders = {name: PromptOrder(range(len(each)), seed) for name, each in sources.items()}
        self.position = 0
        self._places: list[tuple[str, int]] = []
        """The source of each position, and the position in it."""
        self._counts = dict.fromkeys(sources, 0)

    def at(self, position: int) -> PromptRecord:
        """Return the prompt at any position of the run."""
        while len(self._places) <= position:
            num = len(self._places) + 1
            # The source that lags most behind its share.
            name = max(self._shares, key=lambda each: self._shares[each] * num - self._counts[each])
            self._places.append((name, self._counts[name]))
            self._counts[name] += 1
        name, place = self._places[position]
        curriculum = self._curricula.get(name)
        prompts = self._sources[name] if curriculum is None else curriculum.at(position)
        record = prompts[self._orders[name].at(place)]
        return replace(record, source=name) if name else record


LUFFY_GAMMA = 0.1
"""What shapes probabilities in LUFFY (Yan et al. 2025, arXiv:2504.14945)."""


@dataclass(frozen=True)
class Demonstrations:
    """The texts of each optimizer step, and their share of its loss.

    Which texts a step has follows from its place in the run alone, so a checkpoint holds nothing of them.
    """

    policy: LanguageModel
    loader: StepLoader
    settings: SFTSettings
    num_batches: int
    """Batches of rollouts in the run."""

    def share(self, batch: int) -> float:
        """Return the weight of the texts' loss at a batch of rollouts; that of the completions' is 1 less this."""
        start, end = self.settings.share, self.settings.share_at_end
        if end is None:
            return start
        return start + (end - start) * batch / max(self.num_batches - 1, 1)

    def micro_batches(self, index: int) -> tuple[list[Batch], int]:
        """Return this rank's texts for optimizer step `index` of the run, and the target tokens of all ranks."""
        epoch, step = divmod(index, len(self.loader))
        objective = NextTokens(self.policy)
        batches = list(objective.prepare(next(self.loader.steps(epoch, start_step=step))))
        count = torch.stack([objective.num_counted(each) for each in batches]).sum().to(self.policy.device)
        dist.all_reduce(count)
        return batches, max(int(count) // self.policy.shared_by, 1)

    def loss(self, batch: Batch, num_tokens: int) -> torch.Tensor:
        """Return the loss of a micro-batch, as a share of the mean over the `num_tokens` of the whole step.

        With the probability p of a target token, its loss is by `weighting`

            none   -log p
            chord  -p (1 - p) log p, where the factor has no gradient (Zhang et al. 2025, arXiv:2508.11408)
            luffy  -p / (p + 0.1)

        Raises:
            DatasetError: A token is not in the model's vocabulary.
        """
        rows = known_rows(batch, self.policy.model, NextTokens.ignore_index)
        logprobs = self.policy.logprobs(rows)
        if self.settings.weighting == "none":
            return -logprobs.sum() / num_tokens
        probabilities = logprobs.exp()
        if self.settings.weighting == "chord":
            factor = (probabilities * (1 - probabilities)).detach()
            return -(factor * logprobs).sum() / num_tokens
        shaped = probabilities / (probabilities + LUFFY_GAMMA)
        return -(shaped * rows.is_asked.to(shaped.device)).sum() / num_tokens
