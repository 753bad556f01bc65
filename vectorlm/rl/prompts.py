"""The order of the prompts, of one source or several, and of stored groups, over the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from vectorlm.rl.curriculum import Curriculum
from vectorlm.types import PromptRecord

Item = TypeVar("Item")


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
