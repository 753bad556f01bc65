"""A timer that adds up how long each named phase of a step took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Span = tuple[str, float, float]
"""What was done, from when to when."""
BREAK_S = 0.01
"""Breaks shorter than this do not cut a span in two."""


class Timer:
    """Add up the seconds spent in named spans, until they are drained.

    It reads the host's clock: work queued on an accelerator counts where the host waits for it.

    Args:
        clock: Returns seconds that never run backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        """Every span since the beginning, in the order in which they ended; short breaks in one are left out."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time until the end of the block to `name`, also when the block raises.

        Spans may nest; the inner one's time counts for both.
        """
        start = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            if self.spans and self.spans[-1][0] == name and start - self.spans[-1][2] < BREAK_S:
                start = self.spans.pop()[1]
            self.spans.append((name, start, end))

    def drain(self) -> dict[str, float]:
        """Return the seconds by name since the last drain, and start again from nothing."""
        drained, self._seconds = self._seconds, {}
        return drained
