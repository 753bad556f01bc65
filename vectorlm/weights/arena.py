"""Memory that the ranks and the engine share, with no name in any file system."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from vectorlm.weights.plan import Slot, dtype_of


class Arena:
    """A block of shared memory that vanishes with the last process that maps it.

    The creator holds an anonymous file (``memfd_create``); the others open it through the creator's entry in
    ``/proc``. As it never has a name in ``/dev/shm``, no crash can leave it behind.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.bytes: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        """The whole arena, uint8 [num_bytes]."""
        self.path = path_of(descriptor)
        """Where another process of the same user can open it."""

    @classmethod
    def create(cls, num_bytes: int) -> Arena:
        """Make a zeroed arena of `num_bytes`, owned by this process."""
        return cls(reserve(num_bytes), num_bytes)

    @classmethod
    def open(cls, path: str, num_bytes: int) -> Arena:
        """Map the arena that another process created.

        Raises:
            FileNotFoundError: The creator is gone.
            ValueError: The file at `path` is smaller than `num_bytes`.
        """
        if (size := Path(path).stat().st_size) < num_bytes:
            raise ValueError(f"the arena at {path} holds {size} bytes, the layout needs {num_bytes}.")
        return cls(os.open(path, os.O_RDWR), num_bytes)

    def view(self, slot: Slot) -> torch.Tensor:
        """Return the tensor that lives in `slot`; writing to it writes to the arena."""
        raw = self.bytes[slot.offset_bytes : slot.offset_bytes + slot.num_bytes]
        return raw.view(dtype_of(slot.dtype)).view(slot.shape)

    def close(self) -> None:
        """Give the file back; the memory itself goes when the last tensor on it does."""
        os.close(self._descriptor)


def reserve(num_bytes: int) -> int:
    """Make the memory of an arena without mapping it here; return its descriptor, which keeps it alive."""
    descriptor = os.memfd_create("vectorlm-arena")
    os.truncate(descriptor, num_bytes)
    return descriptor


def path_of(descriptor: int) -> str:
    """Return where another process of the same user can open this process's `descriptor`."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"
