"""What an engine may do at the moment: the rules about versions, sleep and closing."""

from __future__ import annotations

from vectorlm.errors import EngineError


class Readiness:
    """Whether an engine may sample; every rank keeps one, and all of them say the same."""

    def __init__(self) -> None:
        self.version = -1
        """The training step whose weights the engine holds; -1 for the checkpoint's."""
        self.held_step: int | None = None
        """The step that need not be loaded again; None where the engine holds no step's weights for certain."""
        self.weights_sleep = False
        """Whether the weights' memory is given away."""
        self._kv_cache_sleeps = False
        self._obstacle: str | None = None
        self._is_closed = False

    def require_open(self) -> None:
        """Raise where the engine has been closed."""
        if self._is_closed:
            raise EngineError("the engine is closed.")

    def require_sampling(self) -> None:
        """Raise where there is nothing to sample with; the text says which call comes first."""
        self.require_open()
        if self.weights_sleep or self._kv_cache_sleeps:
            asleep = "weights" if self.weights_sleep else "KV cache"
            raise EngineError(f"the engine's {asleep} are asleep: call wake_up before sampling.")
        if self._obstacle is not None:
            raise EngineError(f"{self._obstacle}: call update before sampling.")

    def sleep(self, *, weights: bool, kv_cache: bool, num_under_way: int) -> None:
        """Note what sleeps from here on.

        Raises:
            EngineError: Requests are under way, which need both.
        """
        self.require_open()
        if num_under_way:
            raise EngineError(
                f"{num_under_way} requests are under way: take their results or cancel them before sleep."
            )
        self._kv_cache_sleeps |= kv_cache
        if weights:
            self.weights_sleep, self.held_step = True, None
            self._obstacle = "the weights slept and hold nothing"

    def wake_up(self, *, weights: bool, kv_cache: bool) -> None:
        """Note what is awake again; weights still hold nothing."""
        self.require_open()
        self.weights_sleep &= not weights
        self._kv_cache_sleeps &= not kv_cache

    def begin_update(self) -> None:
        """From here until `finish_update`, nobody knows what the weights are; they are awake."""
        self.weights_sleep, self.held_step = False, None
        self._obstacle = "the last update failed, so the weights may be of two steps"

    def finish_update(self, version: int) -> None:
        """The weights are those of `version`."""
        self.version = self.held_step = version
        self._obstacle = None

    def close(self) -> None:
        """Refuse everything from here on."""
        self._is_closed = True
