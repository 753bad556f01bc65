"""Memory that the ranks and the engine share, without a name in any file system."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping

import torch

from vectorlm.errors import EngineDied
from vectorlm.sampling.weights.plan import Layout, Slot, dtype_of

MEMFD_NAME = "vectorlm-arena"


class Arena:
    """A block of shared memory that vanishes with the last process that maps it.

    The creator holds an anonymous file (``memfd_create``); the others open it through the creator's entry in
    ``/proc``. As it never has a name in ``/dev/shm``, no crash can leave it behind.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        on_cuda = torch.cuda.is_available()
        # CUDA makes the pages itself when it pins them; touched beforehand they take seconds in every process.
        flags = mmap.MAP_SHARED | (0 if on_cuda else mmap.MAP_POPULATE)
        self._map = mmap.mmap(descriptor, num_bytes, flags=flags)
        self.bytes: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        """The whole arena, uint8 [num_bytes]."""
        self._unpin = pin(self.bytes) if on_cuda else None
        self.path = path_of(descriptor)
        """Where another process of the same user can open it."""
        # Last: an arena that could not be made leaves its descriptor to the caller.
        self._give_back = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, num_bytes: int) -> Arena:
        """Make a zeroed arena of `num_bytes`, owned by this process."""
        return cls(reserve(num_bytes), num_bytes)

    @classmethod
    def open(cls, path: str, num_bytes: int) -> Arena:
        """Map the arena that another process created; raise `EngineDied` where that process is gone."""
        with _of_a_living_process():
            descriptor = os.open(path, os.O_RDWR)
        try:
            # A server is told the path by its client, who must not make it overwrite a file.
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{MEMFD_NAME}"):
                raise ValueError(f"{path} is no arena.")
            if (size := os.fstat(descriptor).st_size) < num_bytes:
                raise ValueError(f"the arena at {path} holds {size} bytes, the layout needs {num_bytes}.")
            return cls(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    def view(self, slot: Slot) -> torch.Tensor:
        """Return the tensor in `slot`; writing to it writes to the arena."""
        raw = self.bytes[slot.offset_bytes : slot.offset_bytes + slot.num_bytes]
        return raw.view(dtype_of(slot.dtype)).view(slot.shape)

    def is_at(self, path: str) -> bool:
        """Whether `path` leads to this arena."""
        with _of_a_living_process():
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))

    def close(self) -> None:
        """Give the file back, as the last reference does; the memory itself goes when the last tensor on it does."""
        if self._unpin is not None:
            self._unpin()
        self._give_back()


class MappedArenas:
    """The arenas that a rank writes to, each mapped once and kept for the next update."""

    def __init__(self) -> None:
        self._mapped: dict[str, tuple[Arena, dict[Slot, torch.Tensor]]] = {}

    def slots_of(self, layout: Layout) -> Mapping[str, torch.Tensor]:
        """Return the place of each tensor of `layout`, by its name."""
        known = self._mapped.get(layout.path)
        # A later engine in the same process may get the same descriptor, and so the same path.
        if known is None or not known[0].is_at(layout.path):
            self.drop(layout)
            known = self._mapped[layout.path] = Arena.open(layout.path, layout.num_bytes), {}
        arena, places = known
        for slot in layout.slots:
            if slot not in places:
                places[slot] = arena.view(slot)
        return {slot.name: places[slot] for slot in layout.slots}

    def drop(self, layout: Layout) -> None:
        """Let go of one arena, if it was mapped."""
        if layout.path in self._mapped:
            self._mapped.pop(layout.path)[0].close()

    def close(self) -> None:
        """Let go of all of them."""
        while self._mapped:
            self._mapped.popitem()[1][0].close()


def reserve(num_bytes: int) -> int:
    """Make the memory of an arena without mapping it here; return its descriptor, which keeps it alive."""
    descriptor = os.memfd_create(MEMFD_NAME)
    os.truncate(descriptor, num_bytes)
    return descriptor


def pin(block: torch.Tensor) -> Callable[[], object]:
    """Register host memory with CUDA, which then copies at full speed; the call that is returned undoes it.

    It is undone with `block` in any case.
    """
    cudart, address = torch.cuda.cudart(), block.data_ptr()
    torch.cuda.check_error(cudart.cudaHostRegister(address, block.nbytes, 0))
    return weakref.finalize(block, cudart.cudaHostUnregister, address)


def path_of(descriptor: int) -> str:
    """Return where another process of the same user can open this process's `descriptor`."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


@contextlib.contextmanager
def _of_a_living_process() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise EngineDied("the process that made the memory for the weights is gone.") from error
