"""Which parts of the engine are asleep, and what may be done with it meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from vectorlm.errors import EngineError

PARTS = ("weights", "kv_cache")
"""What can sleep by itself; vLLM's own names for the two."""

Parts = frozenset[str]


def parts_of(*, weights: bool, kv_cache: bool) -> Parts:
    """Return the parts that two flags choose."""
    return frozenset(part for part, chosen in zip(PARTS, (weights, kv_cache), strict=True) if chosen)


class Rest:
    """Keeps order between sleeping, waking, updating and sampling, on CPU as on CUDA.

    A part that sleeps gives its device memory away, and what it held is lost: the KV cache comes back empty, the
    weights come back as garbage that nobody may sample from until an update has filled them.

    Args:
        drop: Gives away the memory of the parts named first; those named second sleep already. An `EngineError`
            means that it refused, and that nothing has happened.
        restore: Takes back the memory of these parts.
    """

    def __init__(self, drop: Callable[[Parts, Parts], None], restore: Callable[[Parts], None]) -> None:
        self._drop, self._restore = drop, restore
        self._asleep: Parts = frozenset()
        self._weights_are_lost = False

    @property
    def asleep(self) -> Parts:
        """The parts that sleep."""
        return self._asleep

    def sleep(self, parts: Parts, num_requests: int) -> None:
        """Put `parts` to sleep; those that sleep already stay as they are.

        Raises:
            EngineError: Requests are running.
        """
        if num_requests:
            raise EngineError(
                f"the engine cannot sleep while {num_requests} requests are running: wait for their result, or "
                "cancel them, first."
            )
        if not (new := parts - self._asleep):
            return
        before = self._asleep, self._weights_are_lost
        # Noted before the deed: if it fails half way, what is left must not be sampled from.
        self._asleep |= new
        self._weights_are_lost |= "weights" in new
        try:
            self._drop(new, before[0])
        except EngineError:
            self._asleep, self._weights_are_lost = before
            raise

    def wake_up(self, parts: Parts) -> None:
        """Wake those of `parts` that sleep; one whose memory cannot be had sleeps on, and may be woken again."""
        if due := parts & self._asleep:
            self._restore(due)
            self._asleep -= due

    def begin_update(self) -> None:
        """Wake the weights, which an update needs; the KV cache may sleep on."""
        self.wake_up(frozenset({"weights"}))

    def finish_update(self) -> None:
        """Note that the weights hold what was sent."""
        self._weights_are_lost = False

    def check_sampling(self) -> None:
        """Raise `EngineError` where the engine has nothing to sample with; the text says what to call."""
        if self._asleep:
            parts = sorted(self._asleep, key=PARTS.index)
            calls = f"wake_up({', '.join(f'{part}=True' for part in parts)})"
            if self._weights_are_lost:
                calls += " and update()"
            raise EngineError(f"the engine sleeps ({' and '.join(parts)}): call {calls} before sampling.")
        if self._weights_are_lost:
            raise EngineError(
                "the engine's weights slept and hold nothing since: call update() before sampling."
            )
