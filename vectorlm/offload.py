"""What an optimizer keeps on the device, moved to the host and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True)
class _Parked:
    """Memory that is not on the device now, and what it held."""

    storage: torch.UntypedStorage
    host: torch.Tensor
    """uint8, one element per byte."""


class Offload:
    """Moves the state and the gradients of an optimizer out of the device's memory, and back, bit for bit.

    Memory moves, not tensors: storages are emptied and later filled again, so every tensor that the optimizer, a
    checkpoint or FSDP2 holds (shards and views of one flat buffer included) stays the same object. In between their
    values must not be used. On CPU the same happens between two places of host memory.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: str) -> None:
        """Take the optimizer; nothing moves yet.

        Args:
            optimizer: Any torch optimizer, over plain or FSDP2 parameters.
            device: The device to clear, as torch spells it; what lies elsewhere stays there.
        """
        self._optimizer, self._device = optimizer, torch.device(device)
        self._parked: list[_Parked] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are off the device now."""
        return sum(each.host.numel() for each in self._parked)

    def move_out(self) -> None:
        """Copy everything to the host and free it on the device; what is out already stays out."""
        is_cuda = self._device.type == "cuda"
        if is_cuda:
            # FSDP2 writes gradients on a stream of its own.
            torch.cuda.synchronize(self._device)
        for storage in self._storages():
            # Only pinned memory is copied at full speed; torch keeps it for the next time.
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_cuda)
            host.copy_(_bytes_of(storage))
            self._parked.append(_Parked(storage, host))
            storage.resize_(0)

    def move_back(self) -> None:
        """Put everything back to where it was; where memory runs out, the rest stays out and may be tried again."""
        while self._parked:
            parked = self._parked[-1]
            parked.storage.resize_(parked.host.numel())
            _bytes_of(parked.storage).copy_(parked.host)
            self._parked.pop()

    def _storages(self) -> list[torch.UntypedStorage]:
        """Return the memory behind the optimizer's tensors, each piece once, and never that of the weights."""
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        weights = {storage.data_ptr() for each in parameters for storage in _storages_of(each)}
        held = [self._optimizer.state, [each.grad for each in parameters]]
        found = {
            storage.data_ptr(): storage
            for storage in _storages_of(held)
            if storage.device.type == self._device.type and storage.resizable() and storage.nbytes()
        }
        return [storage for address, storage in found.items() if address not in weights]


def _storages_of(value: Any) -> Iterator[torch.UntypedStorage]:
    """Walk through containers, and through DTensors and other tensors made of tensors."""
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            yield from _storages_of([getattr(value, name) for name in names])
        else:
            yield value.untyped_storage()
    elif isinstance(value, Mapping):
        yield from _storages_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _storages_of(each)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
