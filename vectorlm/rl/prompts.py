"""Choose the prompts and texts of each step: order, mixture of sources, curriculum, demonstrations."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from vectorlm.data.loader import StepLoader
from vectorlm.data.settings import CurriculumSettings
from vectorlm.data.tasks import Tasks
from vectorlm.rl.rollout import RolloutGroup
from vectorlm.rl.settings import SFTSettings
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.objective import NextTokens, known_rows
from vectorlm.train.packing import to_device
from vectorlm.types import Batch, PromptRecord

Item = TypeVar("Item")
SCORE = "reasoning_gym"
"""Name of the reward whose mean decides the level of a curriculum."""


class PromptOrder(Generic[Item]):
    """Items in a new random order on every pass, drawn from the seed.

    `position` is the only state; a resumed run sets it.
    """

    def __init__(self, items: Sequence[Item], seed: int) -> None:
        """Take at least one item, and a seed of at least 0."""
        self._items, self._seed = items, seed
        self.position = 0
        self._order: tuple[int, np.ndarray] | None = None

    def take(self, count: int) -> list[Item]:
        """Return the next `count` items; after the end of a pass, a new pass begins."""
        taken = [self.at(self.position + index) for index in range(count)]
        self.position += count
        return taken

    def at(self, position: int) -> Item:
        """Return the item at any position of the run."""
        epoch, index = divmod(position, len(self._items))
        if self._order is None or self._order[0] != epoch:
            # With seed + epoch, the second pass of one seed would be the first pass of the next.
            generator = np.random.default_rng((self._seed, epoch))
            self._order = epoch, generator.permutation(len(self._items))
        return self._items[self._order[1][index]]


class Curriculum:
    """The level of a task's prompts, and the position of the run where each level began.

    A position keeps its prompt if the level changes later.
    """

    def __init__(self, prompts: Tasks, settings: CurriculumSettings) -> None:
        """Begin at the level of `prompts`."""
        self._prompts, self._settings = prompts, settings
        self._begins = [(0, prompts.level or 0)]
        self._scores: list[float] = []
        """Mean scores of the newest groups of this level."""

    @property
    def level(self) -> int:
        """The level of the next prompts."""
        return self._begins[-1][1]

    def at(self, position: int) -> Sequence[PromptRecord]:
        """Return the prompts of the level at a position of the run."""
        level = next(level for start, level in reversed(self._begins) if start <= position)
        return self._prompts.at_level(level)

    def observe(self, groups: Sequence[RolloutGroup], position: int) -> None:
        """Read the scores of a step; a new level begins at `position`, the first position that was not sampled yet."""
        for group in groups:
            score = group.rewards_by_name[SCORE].nanmean().item()
            # Stored groups, and groups that started before this level, do not count.
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
        """Return the state for a checkpoint."""
        return {"begins": list(self._begins), "scores": list(self._scores)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state`."""
        self._begins = [(start, level) for start, level in state["begins"]]
        self._scores = list(state["scores"])


class PromptMixture:
    """Prompts of several sources, mixed by their shares; every source has its own `PromptOrder`.

    Among the first n prompts, every source has its share of n, with an error below one prompt per source. `position` is
    the only state, besides the state of the curricula.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[PromptRecord]],
        seed: int,
        shares: Mapping[str, float],
        curricula: Mapping[str, Curriculum],
    ) -> None:
        """Take prompts, shares that add up to 1, and curricula by source name; prompts get the name of their source."""
        self._sources, self._shares, self._curricula = sources, shares, curricula
        self._orders = {name: PromptOrder(range(len(prompts)), seed) for name, prompts in sources.items()}
        self.position = 0
        self._places: list[tuple[str, int]] = []
        """The source of each position, and the position in that source."""
        self._counts = dict.fromkeys(sources, 0)

    def at(self, position: int) -> PromptRecord:
        """Return the prompt at any position of the run."""
        while len(self._places) <= position:
            num = len(self._places) + 1
            # Choose the source that is furthest behind its share.
            name = max(self._shares, key=lambda source: self._shares[source] * num - self._counts[source])
            self._places.append((name, self._counts[name]))
            self._counts[name] += 1
        name, place = self._places[position]
        curriculum = self._curricula.get(name)
        prompts = self._sources[name] if curriculum is None else curriculum.at(position)
        record = prompts[self._orders[name].at(place)]
        return replace(record, source=name) if name else record


LUFFY_GAMMA = 0.1
"""Constant of LUFFY's shaping (Yan et al. 2025, arXiv:2504.14945)."""


@dataclass(frozen=True)
class Demonstrations:
    """Texts that the policy learns in every optimizer step, and their share of its loss.

    The texts of a step depend only on its position in the run: a checkpoint needs no state of them.
    """

    policy: LanguageModel
    loader: StepLoader
    settings: SFTSettings
    num_batches: int
    """Number of batches of rollouts in the run."""

    def share(self, batch: int) -> float:
        """Return the weight of the texts' loss at a batch of rollouts; the completions have the weight 1 - share."""
        start, end = self.settings.share, self.settings.share_at_end
        if end is None:
            return start
        return start + (end - start) * batch / max(self.num_batches - 1, 1)

    def micro_batches(self, index: int) -> tuple[list[Batch], int]:
        """Return this rank's texts for optimizer step `index` of the run, and all ranks' number of target tokens."""
        epoch, step = divmod(index, len(self.loader))
        objective = NextTokens(self.policy)
        batches = list(objective.prepare(next(self.loader.steps(epoch, start_step=step))))
        count = torch.stack([objective.num_counted(batch) for batch in batches]).sum().to(self.policy.device)
        dist.all_reduce(count)
        return batches, max(int(count) // self.loader.topology.ranks_per_share, 1)

    def loss(self, batch: Batch, num_tokens: int) -> torch.Tensor:
        """Return the loss of a micro-batch, as a share of the mean over the `num_tokens` of the whole step.

        The loss of a target token with probability p, by `weighting`:

            none   -log p
            chord  -p (1 - p) log p; the factor has no gradient (Zhang et al. 2025, arXiv:2508.11408)
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
        return -(shaped * to_device(rows.is_asked, shaped.device)).sum() / num_tokens
