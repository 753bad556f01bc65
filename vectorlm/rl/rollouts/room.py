"""How many sequences may ask an engine at once, fixed or found by the engine's rate."""

from __future__ import annotations

GROWTH, GAIN = 1.5, 1.1
"""A larger room is tried by the first factor, and kept if the engine's rate grows by more than the second."""
MIN_ANSWERS, MIN_WINDOW_S = 64, 1.0
MAX_REST = 16


class Room:
    """Grows as long as the engine's tokens per second do; measured while rollouts wait for room, in windows."""

    def __init__(self, size: int, most: int | None = None) -> None:
        """Begin with `size` sequences; without `most` it stays so."""
        self.size, self._most = size, most
        self.is_short = False
        """Whether a group waits for room."""
        self._kept, self._kept_rate = size, 0.0
        self._rest = self._num_resting = 1
        """Windows from one attempt to the next, and those that are left."""
        self._begin(0.0)

    def answered(self, num_tokens: int, now_s: float) -> None:
        """Take note of an answer of the engine."""
        if self._most is None or not self.is_short:
            self._begin(now_s)
            return
        self._num_answers += 1
        self._num_tokens += num_tokens
        took_s = now_s - self._began_s
        # By then each place has been answered twice or so: an answer comes when it is whole.
        if took_s < MIN_WINDOW_S or self._num_answers < max(2 * self.size, MIN_ANSWERS):
            return
        self._look(self._num_tokens / took_s)
        self._begin(now_s)

    def _look(self, rate: float) -> None:
        """Go on from the rate of a window."""
        if self.size == self._kept:
            self._kept_rate = rate
            self._num_resting -= 1
        elif rate > GAIN * self._kept_rate:
            self._kept, self._kept_rate = self.size, rate
            self._rest, self._num_resting = 1, 0
        else:
            self.size = self._kept
            self._rest = self._num_resting = min(2 * self._rest, MAX_REST)
        if self._num_resting <= 0 and self._most is not None:
            self.size = min(int(GROWTH * self._kept) + 1, self._most)

    def _begin(self, now_s: float) -> None:
        self._began_s, self._num_answers, self._num_tokens = now_s, 0, 0
