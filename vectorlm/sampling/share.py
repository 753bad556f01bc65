"""One host's share of a batch: the chunks of prompts that its engine took from the common queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vectorlm.sampling import messages as say

if TYPE_CHECKING:
    import numpy as np

    from vectorlm.sampling.channel import Channel

CHUNKS_UNDER_WAY = 8
"""Into how many chunks an engine's fill is cut where engines compete for prompts."""


class EngineShare:
    """Draws chunks from the queue while its engine has room, and collects their answers.

    The queue is a counter that all hosts draw from, so an engine that is ahead takes more, and nobody dispatches.
    """

    def __init__(
        self, channel: Channel, draw: Callable[[], int], chunks: Sequence[say.Generate], room: int
    ) -> None:
        """Take the first chunks.

        Args:
            channel: The line to this host's engine.
            draw: Returns the next chunk's place in `chunks`; places past the end say that none is left.
            chunks: The whole batch, alike on all hosts.
            room: Prompts that the engine may have under way.
        """
        self._channel = channel
        self._draw = draw
        self._chunks = chunks
        self._room = room
        self._is_drained = False
        self._under_way: dict[int, int] = {}
        self.answers: dict[int, Sequence[np.ndarray]] = {}
        """What has been collected, by the chunk's place."""
        self._advance()

    def is_finished(self) -> bool:
        """Return whether nothing is left to take or to wait for."""
        self._advance()
        return self._is_drained and all(map(self._channel.has_answer, self._under_way.values()))

    def collect(self, silence_s: float, deadline_s: float | None) -> dict[int, Sequence[np.ndarray]]:
        """Wait for every answer; raises as `Channel.answer` does, and may be called again after a time-out."""
        self._advance()
        while self._under_way:
            place, number = next(iter(self._under_way.items()))
            generated: Any = self._channel.answer(number, silence_s, "generating", deadline_s)
            del self._under_way[place]
            self.answers[place] = generated.arrays
            self._advance()
        return self.answers

    def take_back(self) -> None:
        """Abort what is under way, and take nothing more."""
        self._is_drained = True
        for number in self._under_way.values():
            self._channel.take_back(number)
        self._under_way.clear()

    def _advance(self) -> None:
        while not self._is_drained and self._num_under_way() < self._room:
            place = self._draw()
            if place >= len(self._chunks):
                self._is_drained = True
                return
            self._under_way[place] = self._channel.send(self._chunks[place])

    def _num_under_way(self) -> int:
        waiting = (place for place, number in self._under_way.items() if not self._channel.has_answer(number))
        return sum(len(self._chunks[place].prompts) for place in waiting)
