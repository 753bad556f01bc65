"""Hand the devices over between the trainer and its engine."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from vectorlm.errors import (
    ChangedBySleep,
    EngineDied,
    EngineError,
    EngineTimeout,
    OutOfTurn,
    RankMismatch,
    WeightMismatch,
)
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.settings import CHECKED_SLEEPS
from vectorlm.sampling.weights.arena import pin
from vectorlm.settings import require_choice
from vectorlm.types import Engine, InFlight, UpdateReport

SleepMode = Literal["none", "kv_cache", "all"]
"""The memory that the engine frees while the trainer works."""
RAISED_ON_ALL_RANKS = (EngineError, RankMismatch, WeightMismatch)
ENGINE_IS_GONE = (EngineDied, EngineTimeout, ChangedBySleep)


def put_to_sleep(engine: Engine, sleep: SleepMode) -> None:
    """Free the memory of `engine` that `sleep` names; all ranks call this."""
    if sleep != "none":
        engine.sleep(weights=sleep == "all", kv_cache=True)


class DeviceTurn:
    """Hand the devices over between a trainer and its engine.

    The trainer has the devices, except inside the `sampling` blocks, which all ranks open:

    >>> turn = DeviceTurn(engine, model=model, optimizer=optimizer, sleep="all")  # doctest: +SKIP
    >>> for step in range(num_steps):
    ...     with turn.sampling(step):
    ...         answers = engine.sample(prompts)
    ...     train_on(answers)

    You need no barriers: no rank trains before the engine has freed its memory. The engine allocates no memory before
    every rank has freed its own. On CPU, where vLLM frees nothing, the same calls are made in the same order.
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
        """Put the engine to sleep, which gives the trainer the devices; all ranks call this.

        Args:
            engine: Awake or asleep; on CUDA built with ``enable_sleep_mode=True`` unless `sleep` is `none`.
            model: The trained model, whose weights the engine samples with.
            optimizer: Its steps raise while the engine has the devices.
            sleep: The memory that the engine frees while the trainer works: none, its KV cache, or its weights too.
            offload_optimizer: Keep the optimizer's state and the gradients on the host while the engine works.
            in_flight: How requests in flight are treated when new weights arrive; see `Engine.update`. All values but
                `refuse` need an engine that stays awake.
            topology: This rank's place; None reads it from the environment.

        Raises:
            ValueError: `sleep` is unknown, `in_flight` needs sleep='none', or there is no optimizer to offload.
            EngineError: The engine cannot sleep; the text gives the reason.
        """
        require_choice("sleep", sleep, SleepMode)
        if sleep != "none" and in_flight != "refuse":
            raise ValueError(
                f"in_flight={in_flight!r} needs sleep='none': a sleeping engine drops its requests."
            )
        if offload_optimizer and optimizer is None:
            raise ValueError("offload_optimizer=True needs the optimizer: pass optimizer=….")
        topology = Topology.from_environment() if topology is None else topology
        self.engine, self._model = engine, model
        self._sleep, self._in_flight = sleep, in_flight
        self._topology = topology
        if optimizer is not None:
            optimizer.register_step_pre_hook(_weakly(self._refuse_step))
        self._offload = Offload(optimizer, topology.device) if optimizer and offload_optimizer else None
        self._step: int | None = None
        self.before_update: Callable[[int], None] = lambda step: None
        """Sends other weights to the awake engine, before the update to the weights of a step."""
        self.swapped_at: float | None = None
        """Time of the engine's last update, in seconds of ``time.perf_counter``; None before the first update."""
        self.busy: list[tuple[float, float]] = []
        """Spans in which the engine computed, as it reports them: (start, end). The reader empties the list."""
        put_to_sleep(engine, sleep)

    @contextmanager
    def sampling(self, step: int) -> Iterator[UpdateReport]:
        """Give the engine the devices and the weights of `step` for a block; all ranks call this.

        The order minimises memory. The optimizer leaves the device; the engine's weights wake and are replaced; its KV
        cache wakes; the block runs; the engine sleeps; the optimizer returns. Gradients survive the block.

        Args:
            step: The version of the weights, as for `Engine.update`.

        Yields:
            The report of the hot swap.

        Raises:
            OutOfTurn: A sampling block is already open.
            VectorLMError: See `Engine.update`, `sleep` and `wake_up`.
        """
        if self._step is not None:
            raise OutOfTurn(
                f"sampling at step {step} was opened inside the sampling of step {self._step}. End that block first."
            )
        self._step = step
        try:
            if self._offload is not None:
                self._offload.move_out()
            self._empty_cache()
            if self._sleep == "all":
                self.engine.wake_up(weights=True, kv_cache=False)
            self.before_update(step)
            report = self.engine.update(self._model, step, in_flight=self._in_flight)
            if not report.skipped:
                self.swapped_at = time.perf_counter()
                self.busy += report.busy
            if self._sleep != "none":
                # The update has left temporaries in the cache.
                self._empty_cache()
                self.engine.wake_up(weights=False, kv_cache=True)
            yield report
        except BaseException as error:
            self._recover(error)
            raise
        else:
            put_to_sleep(self.engine, self._sleep)
        finally:
            # The next block works after an error of `move_back`, too.
            self._step = None
            if self._offload is not None:
                self._offload.move_back()

    def check_sleep(self) -> None:
        """Wake the engine, update it and put it to sleep again; it checks that sleeping did not change it.

        All ranks call this before the first step.

        Raises:
            ChangedBySleep: See `SamplingEngine.wake_up`.
        """
        if self._sleep != "none":
            for _ in range(CHECKED_SLEEPS):
                with self.sampling(0):
                    pass
            self.swapped_at, self.busy = None, []

    def _empty_cache(self) -> None:
        """Free torch's cached memory, which the engine's process could not use."""
        if self._topology.is_cuda and self._sleep != "none":
            torch.cuda.empty_cache()

    def _recover(self, error: BaseException) -> None:
        """Put the engine to sleep after an error that all ranks raise.

        After an error of only this rank the engine stays awake, because the other ranks would not join the call. The
        next block may start with an awake engine.
        """
        on_all_ranks = self._topology.world_size == 1 or isinstance(error, RAISED_ON_ALL_RANKS)
        if on_all_ranks and not isinstance(error, ENGINE_IS_GONE):
            try:
                put_to_sleep(self.engine, self._sleep)
            except EngineError as second:
                error.add_note(f"Then the engine could not be put to sleep: {second}")

    def _refuse_step(self) -> None:
        if self._step is not None:
            raise OutOfTurn(
                f"optimizer.step() was called inside the sampling block of step {self._step}, while the engine "
                "uses the devices. Call it after this block."
            )


def _weakly(method: Callable[[], None]) -> Callable[..., None]:
    """Return a hook that calls the method while its object exists.

    An optimizer outlives the notebook cell that makes the turn: it must keep neither the engine nor the host block.
    """
    reference = weakref.WeakMethod(method)

    def hook(*_: Any) -> None:
        if (bound := reference()) is not None:
            bound()

    return hook


class Offload:
    """Moves the state and the gradients of an optimizer from the device to the host and back, bit for bit.

    Memory moves, not tensors: storages are emptied and later filled again. Every tensor that the optimizer, a
    checkpoint or FSDP2 refers to (shards and views of one flat buffer included) stays the same object. While the state
    is on the host, these tensors must not be used. On CPU, both places are host memory.

    On CUDA a separate stream copies back, and forward and backward passes do not wait for it. The optimizer's `step`,
    `state_dict` and `load_state_dict` do wait; other readers of the state call `wait` first.

    If memory runs out on the way back, the rest stays on the host. Free memory before the next backward pass: the next
    `wait` or `move_back` retries.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: str) -> None:
        self._optimizer, self._device = optimizer, torch.device(device)
        self._stream = torch.cuda.Stream(device) if self._device.type == "cuda" else None
        if self._stream is not None:
            # After this object's end the hooks do not wait for copies of `move_back`, which read the host block.
            weakref.finalize(self, self._stream.synchronize)
        wait = _weakly(self.wait)
        optimizer.register_step_pre_hook(wait)
        optimizer.register_state_dict_pre_hook(wait)
        optimizer.register_load_state_dict_pre_hook(wait)
        self._parked: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._host = torch.empty(0, dtype=torch.uint8)
        self._is_out = False

    @property
    def num_bytes(self) -> int:
        """Number of bytes that are on the host now."""
        return sum(host.numel() for _, host in self._parked)

    def move_out(self) -> None:
        """Copy everything to the host and free it on the device; a second call moves only new tensors."""
        self._is_out = True
        is_cuda = self._stream is not None
        if is_cuda:
            # FSDP2 writes gradients on another stream.
            torch.cuda.synchronize(self._device)
        storages = self._storages()
        if not storages:
            return
        sizes = [storage.nbytes() for storage in storages]
        if self._parked or self._host.numel() < sum(sizes):
            # One block for all tensors, reused next time; parked tensors keep an earlier block alive.
            self._host = _host_block(sum(sizes), is_cuda)
        places = self._host[: sum(sizes)].split(sizes)
        for storage, host in zip(storages, places, strict=True):
            host.copy_(_bytes_of(storage), non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize(self._device)
        for storage, host in zip(storages, places, strict=True):
            self._parked.append((storage, host))
            storage.resize_(0)

    def move_back(self) -> None:
        """Start to copy everything back; if memory runs out, the rest stays on the host and a second call retries."""
        self._is_out = False
        try:
            while self._parked:
                storage, host = self._parked[-1]
                storage.resize_(host.numel())
                content = _bytes_of(storage)
                if self._stream is None:
                    content.copy_(host)
                else:
                    # Earlier work may still read the former content of this memory.
                    self._stream.wait_stream(torch.cuda.current_stream(self._device))
                    with torch.cuda.stream(self._stream):
                        content.copy_(host, non_blocking=True)
                    content.record_stream(self._stream)
                self._parked.pop()
        finally:
            if any(parameter.grad is not None for parameter in self._parameters()):
                self._join()  # A backward pass adds to gradients.

    def wait(self) -> None:
        """Make later work of the device wait for the copies of `move_back`, and start those that failed again.

        Raises:
            OutOfTurn: The state is on the host, because the engine has the devices.
        """
        if self._parked and self._is_out:
            raise OutOfTurn(
                "the optimizer's state cannot be read inside a sampling block, because it is on the host. Read it "
                "after the block."
            )
        if self._parked:
            self.move_back()
        self._join()

    def _join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _storages(self) -> list[torch.UntypedStorage]:
        """Return the storages of the optimizer's tensors, each once, without the weights."""
        parameters = self._parameters()
        weights = {storage.data_ptr() for storage in _storages_of(parameters)}
        gradients = [parameter.grad for parameter in parameters]
        found = {
            storage.data_ptr(): storage
            for storage in _storages_of([self._optimizer.state, gradients])
            if storage.device.type == self._device.type and storage.resizable() and storage.nbytes()
        }
        return [storage for address, storage in found.items() if address not in weights]


def _host_block(num_bytes: int, is_pinned: bool) -> torch.Tensor:
    """Allocate host memory; only pinned memory is copied from and to a CUDA device at full speed."""
    block = torch.empty(num_bytes, dtype=torch.uint8)
    if is_pinned:
        # torch's own allocator rounds up to a power of two: 57 GiB would become 64 GiB.
        pin(block)
    return block


def _storages_of(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all tensors in a container; DTensors and other wrappers are unwrapped."""
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            yield from _storages_of([getattr(value, name) for name in names])
        else:
            yield value.untyped_storage()
    elif isinstance(value, Mapping):
        yield from _storages_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _storages_of(item)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
