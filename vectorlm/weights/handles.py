"""Handles: how a process says where a tensor of its own lies, so that another one of its node can read it in place."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from vectorlm.errors import EngineError, StaleHandle
from vectorlm.weights.arena import path_of
from vectorlm.weights.plan import dtype_name, dtype_of

DEVICE_ARGUMENT = 6
"""Place of the device's index among the arguments of torch's ``rebuild_cuda_tensor``; each process has its own."""


@dataclass(frozen=True)
class FileHandle:
    """A tensor in host memory, as a piece of a file without a name that its process holds open."""

    path: str
    """The file's entry in ``/proc``."""
    identity: tuple[int, int]
    """Its device and inode: a process uses descriptors again, so the path may come to lead elsewhere."""
    num_bytes: int
    """Size of the file."""
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> FileHandle:
        """Move the storage of a contiguous tensor into shared memory, in place, unless it is there; point at it.

        All tensors on that storage stay the same objects and see the same values at another address. torch keeps one
        descriptor for each storage.
        """
        descriptor, num_bytes = tensor.untyped_storage()._share_fd_cpu_()
        status, start = os.fstat(descriptor), int(tensor.storage_offset()) * tensor.element_size()
        identity = status.st_dev, status.st_ino
        shape = tuple(tensor.shape)
        return cls(path_of(descriptor), identity, num_bytes, start, shape, dtype_name(tensor.dtype))

    def check(self) -> None:
        """Raise `StaleHandle` where the process is gone, or its descriptor has become another file's."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise StaleHandle(f"{self.path} is closed: its rank is gone, or has let go of it.") from error
        if (status.st_dev, status.st_ino) != self.identity:
            raise StaleHandle(f"{self.path} is another file than the one that was exported.")

    def open(self) -> torch.Tensor:
        """Map the memory; raise `StaleHandle` as `check` does. The tensor is the other process's own."""
        self.check()
        with open(self.path, "rb+", buffering=0) as file:
            # The file that is open now cannot be exchanged any more.
            mine = replace(self, path=f"/proc/self/fd/{file.fileno()}")
            mine.check()
            storage = torch.UntypedStorage.from_file(mine.path, True, self.num_bytes)
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
        kind, count = dtype_of(self.dtype), torch.Size(self.shape).numel()
        piece: torch.Tensor = raw[self.offset_bytes : self.offset_bytes + count * kind.itemsize]
        return piece.view(kind).view(self.shape)


@dataclass(frozen=True)
class DeviceHandle:
    """A tensor in the memory of a CUDA device, as torch hands it to other processes. Has not run.

    The exporting rank keeps the tensor, so torch's count of receivers, which is made for one, does not matter.
    """

    device: str
    """The device's UUID: processes may number devices differently."""
    arguments: tuple[Any, ...]
    """What ``rebuild_cuda_tensor`` wants, with the device's index in the exporting process."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> DeviceHandle:
        """Point at `tensor`, which stays where it is."""
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(tensor)
        return cls(_uuid(tensor.device), tuple(arguments))

    def check(self) -> None:
        """Do nothing: CUDA cannot tell, and ranks export again what has moved."""

    def open(self) -> torch.Tensor:
        """Map the memory; raise `EngineError` where this process does not see the device."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        visible = [_uuid(index) for index in range(torch.cuda.device_count())]
        if self.device not in visible:
            raise EngineError(
                f"a rank's weights are on the device {self.device}, which the engine's process does not see: leave "
                "CUDA_VISIBLE_DEVICES the same for both, or use transport='bucketed'."
            )
        arguments = list(self.arguments)
        arguments[DEVICE_ARGUMENT] = visible.index(self.device)
        tensor: torch.Tensor = rebuild_cuda_tensor(*arguments)
        return tensor


Handle = FileHandle | DeviceHandle


def handle_of(tensor: torch.Tensor) -> Handle:
    """Return the handle of a contiguous tensor, by the device that it lies on."""
    return DeviceHandle.of(tensor) if tensor.is_cuda else FileHandle.of(tensor)


def _uuid(device: int | torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
