"""Whose turn it is on the devices: the trainer's or the engine's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch

from vectorlm.errors import EngineDied, EngineError, EngineTimeout, OutOfTurn, RankMismatch, WeightMismatch
from vectorlm.offload import Offload
from vectorlm.ranks.topology import Topology
from vectorlm.types import Engine, InFlight, UpdateReport

SleepMode = Literal["none", "kv_cache", "all"]
"""What of the engine sleeps while the trainer works."""

FELT_BY_ALL = (EngineError, RankMismatch, WeightMismatch)
"""Errors of the engine's calls, which every rank gets alike."""
PAST_SLEEP = (EngineDied, EngineTimeout)
"""Errors after which no engine is there to be put to sleep."""


def lay_down(engine: Engine, sleep: SleepMode) -> None:
    """Put as much of `engine` to sleep as `sleep` says; called on all ranks."""
    if sleep != "none":
        engine.sleep(weights=sleep == "all", kv_cache=True)


class DeviceTurn:
    """Hands the devices over between a trainer and its engine.

    The devices are the trainer's, but for the blocks that `sampling` opens on all ranks:

    >>> turn = DeviceTurn(engine, model=model, optimizer=optimizer, sleep="all")  # doctest: +SKIP
    >>> for step in range(num_steps):
    ...     with turn.sampling(step):
    ...         answers = engine.sample(prompts)
    ...     train_on(answers)

    There are no barriers to place: no rank trains before the engine has let its memory go, and the engine takes no
    memory before every rank has let go of its own. On CPU, where vLLM gives nothing away, the same calls are made in
    the same order.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        sleep: SleepMode = "none",
        offload_optimizer: bool = False,
        in_flight: InFlight = "refuse",
        topology: Topology | None = None,
    ) -> None:
        """Put the engine to sleep, so that the turn is the trainer's; called on all ranks.

        Args:
            engine: Awake or asleep; on CUDA built with ``enable_sleep_mode=True`` unless `sleep` is `none`.
            model: The trained model, whose weights the engine samples with.
            optimizer: Guarded against steps out of turn.
            sleep: What of the engine sleeps while the trainer works: nothing, its KV cache, or its weights too.
            offload_optimizer: Keep the optimizer's state and the gradients on the host while the engine works.
            in_flight: What becomes of requests under way when a block brings new weights; see `Engine.update`. Other
                than `refuse`, it needs an engine that stays awake.
            topology: This rank's place; read from the environment when omitted.

        Raises:
            ValueError: `sleep` is unknown, or requests shall outlive it, or there is no optimizer to offload.
            EngineError: The engine cannot sleep; the text says why.
        """
        if sleep not in get_args(SleepMode):
            raise ValueError(
                f"sleep={sleep!r} is not known: it must be one of {', '.join(get_args(SleepMode))}."
            )
        if sleep != "none" and in_flight != "refuse":
            raise ValueError(
                f"in_flight={in_flight!r} needs sleep='none': an engine that sleeps holds no requests."
            )
        if offload_optimizer and optimizer is None:
            raise ValueError("offload_optimizer=True needs the optimizer: pass optimizer=….")
        topology = Topology.from_environment() if topology is None else topology
        self._engine, self._model, self._sleep, self._in_flight = engine, model, sleep, in_flight
        self._is_cuda, self._is_alone = topology.is_cuda, topology.world_size == 1
        self._offload = Offload(optimizer, topology.device) if optimizer and offload_optimizer else None
        self._step: int | None = None
        self.swapped_at: float | None = None
        """When the engine got its newest weights, in seconds of ``time.perf_counter``."""
        self.busy: list[tuple[float, float]] = []
        """When the engine computed until then, by its own reports; whoever reads this empties it."""
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._refuse_step)
        lay_down(engine, sleep)

    @contextmanager
    def sampling(self, step: int) -> Iterator[UpdateReport]:
        """Give the engine the devices and the weights of `step` for a block; called on all ranks.

        The memory-saving order: the optimizer leaves the device, the engine's weights wake and are replaced, its KV
        cache wakes, the block runs, the engine sleeps, the optimizer returns. Training goes on as if nothing had
        been: gradients that were there before are there afterwards.

        Args:
            step: The version of the weights, as for `Engine.update`.

        Yields:
            What the hot swap did.

        Raises:
            OutOfTurn: It is the engine's turn already.
            VectorLMError: As for `Engine.update`, `sleep` and `wake_up`.
        """
        if self._step is not None:
            raise OutOfTurn(
                f"sampling at step {step} began inside the sampling of step {self._step}: end that block first."
            )
        self._step = step
        try:
            self._clear_device()
            if self._sleep == "all":
                self._engine.wake_up(weights=True, kv_cache=False)
            report = self._engine.update(self._model, step, in_flight=self._in_flight)
            if not report.skipped:
                self.swapped_at = time.perf_counter()
                self.busy += report.busy
            if self._sleep != "none":
                self._engine.wake_up(weights=False, kv_cache=True)
            yield report
        except BaseException as error:
            self._recover(error)
            raise
        else:
            lay_down(self._engine, self._sleep)
        finally:
            if self._offload is not None:
                self._offload.move_back()
            self._step = None

    def _clear_device(self) -> None:
        if self._offload is not None:
            self._offload.move_out()
        if self._is_cuda and self._sleep != "none":
            # The engine's process can map only what torch does not keep for itself.
            torch.cuda.empty_cache()

    def _recover(self, error: BaseException) -> None:
        """Put the engine to sleep after an error, where all ranks are here to do so.

        An error of this rank alone leaves it awake: the others would be waited for in vain, and the next block
        begins as well with an engine that is awake.
        """
        if (self._is_alone or isinstance(error, FELT_BY_ALL)) and not isinstance(error, PAST_SLEEP):
            try:
                lay_down(self._engine, self._sleep)
            except EngineError as second:
                error.add_note(f"Afterwards the engine could not be put to sleep: {second}")

    def _refuse_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._step is not None:
            raise OutOfTurn(
                f"an optimizer step was made inside the sampling of step {self._step}, while the device is the "
                "engine's: make it after that block."
            )
