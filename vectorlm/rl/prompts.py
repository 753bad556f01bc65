"""The order of the prompts, and of stored groups, over the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

Item = TypeVar("Item")


class PromptOrder(Generic[Item]):
    """Walks through prompts, or anything else, in a new order on each pass, drawn from the seed.

    The only state is `position`: a run that resumes sets it.
    """

    def __init__(self, items: Sequence[Item], seed: int, position: int = 0) -> None:
        """Start behind the first `position` items, of at least one; the seed is at least 0."""
        self._items, self._seed = items, seed
        self.position = position
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
