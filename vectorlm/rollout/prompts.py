"""The order in which questions are asked, and stored groups trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

Item = TypeVar("Item")


class PromptOrder(Generic[Item]):
    """Walks through questions, or anything else, in a new order on each pass, drawn from the seed.

    The only state is `position`: a run that resumes sets it and goes on.
    """

    def __init__(self, questions: Sequence[Item], seed: int, position: int = 0) -> None:
        """Start at a position.

        Args:
            questions: At least one.
            seed: What the order of each pass is drawn from, at least 0.
            position: Questions that were taken before.
        """
        self._questions, self._seed = questions, seed
        self.position = position
        self._order: tuple[int, np.ndarray] | None = None

    def take(self, count: int) -> list[Item]:
        """Return the next questions; a pass that ends is followed by the next one."""
        taken = [self.at(self.position + index) for index in range(count)]
        self.position += count
        return taken

    def at(self, position: int) -> Item:
        """Return the question that is, was or will be taken at a position."""
        epoch, index = divmod(position, len(self._questions))
        if self._order is None or self._order[0] != epoch:
            # The pair is hashed: seed + epoch would give one seed's second pass another seed's first.
            generator = np.random.default_rng((self._seed, epoch))
            self._order = epoch, generator.permutation(len(self._questions))
        return self._questions[self._order[1][index]]
