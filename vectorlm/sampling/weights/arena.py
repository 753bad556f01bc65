"""The arena: memory that ranks and engine share, and the places of tensors in it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from vectorlm.errors import EngineDied, WeightMismatch
from vectorlm.sampling.weights.inspection import widest_word
from vectorlm.sampling.weights.plan import Layout, Slot, TensorSpec, dtype_of
from vectorlm.sampling.weights.record import Copy, LoadPlan

MEMFD_NAME = "vectorlm-arena"


class Arena:
    """A block of shared memory that disappears with the last process that maps it.

    The creator opens an anonymous file (``memfd_create``), and other processes open it through the creator's entry in
    ``/proc``. A crash leaves nothing behind, because the file has no name in ``/dev/shm``.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        on_cuda = torch.cuda.is_available()
        # CUDA creates the pages when it pins them; populating them before takes seconds in every process.
        flags = mmap.MAP_SHARED | (0 if on_cuda else mmap.MAP_POPULATE)
        self._map = mmap.mmap(descriptor, num_bytes, flags=flags)
        self.bytes: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        """The whole arena, uint8 [num_bytes]."""
        self._unpin = pin(self.bytes) if on_cuda else None
        self.path = path_of(descriptor)
        """The path at which another process of the same user can open it."""
        # Last: if the constructor fails, the caller still owns the descriptor.
        self._close_file = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, num_bytes: int) -> Arena:
        """Create a zeroed arena of `num_bytes`."""
        return cls(reserve(num_bytes), num_bytes)

    @classmethod
    def open(cls, path: str, num_bytes: int) -> Arena:
        """Map the arena of another process; raise `EngineDied` if that process has ended."""
        with _engine_must_live():
            descriptor = os.open(path, os.O_RDWR)
        try:
            # The client of a server names the path, and the server must not overwrite other files.
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{MEMFD_NAME}"):
                raise ValueError(f"path={path!r}: it must be an arena.")
            if (size := os.fstat(descriptor).st_size) < num_bytes:
                raise ValueError(
                    f"path={path!r}: the arena has {size} bytes, and the layout needs {num_bytes}."
                )
            return cls(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    def view(self, slot: Slot) -> torch.Tensor:
        """Return the tensor in `slot`, a view of the arena."""
        raw = self.bytes[slot.offset_bytes : slot.offset_bytes + slot.num_bytes]
        return raw.view(dtype_of(slot.dtype)).view(slot.shape)

    def is_at(self, path: str) -> bool:
        """Whether `path` is the path of this arena."""
        with _engine_must_live():
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))

    def close(self) -> None:
        """Close the file. The memory is freed with the last tensor on it."""
        if self._unpin is not None:
            self._unpin()
        self._close_file()


class MappedArenas:
    """The arenas that a rank writes to; each stays mapped for the next update."""

    def __init__(self) -> None:
        self._mapped: dict[str, tuple[Arena, dict[int, tuple[Layout, Mapping[str, torch.Tensor]]]]] = {}

    def slots_of(self, layout: Layout) -> Mapping[str, torch.Tensor]:
        """Return a view for each tensor of `layout`, by name; the same object until the arena changes."""
        known = self._mapped.get(layout.path)
        # A later engine in the same process may get the same descriptor and path.
        if known is None or not known[0].is_at(layout.path):
            self.drop(layout)
            known = self._mapped[layout.path] = Arena.open(layout.path, layout.num_bytes), {}
        arena, places = known
        if id(layout) not in places:
            # Keeps the layout, because its identity is the key.
            places[id(layout)] = layout, {slot.name: arena.view(slot) for slot in layout.slots}
        return places[id(layout)][1]

    def drop(self, layout: Layout) -> None:
        """Let go of one arena, if it was mapped."""
        if layout.path in self._mapped:
            self._mapped.pop(layout.path)[0].close()

    def close(self) -> None:
        """Close all arenas."""
        while self._mapped:
            self._mapped.popitem()[1][0].close()


def reserve(num_bytes: int) -> int:
    """Allocate an arena without mapping it; return its descriptor, which keeps it alive."""
    descriptor = os.memfd_create(MEMFD_NAME)
    os.truncate(descriptor, num_bytes)
    return descriptor


def pin(block: torch.Tensor) -> Callable[[], object]:
    """Register host memory with CUDA for copies at full speed; return a function that undoes it.

    The registration ends with `block` at the latest.
    """
    cudart, address = torch.cuda.cudart(), block.data_ptr()
    torch.cuda.check_error(cudart.cudaHostRegister(address, block.nbytes, 0))
    return weakref.finalize(block, cudart.cudaHostUnregister, address)


def path_of(descriptor: int) -> str:
    """Return where another process of the same user can open this process's `descriptor`."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


@contextlib.contextmanager
def _engine_must_live() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise EngineDied("the process that created the memory for the weights has ended.") from error


ALIGNMENT = 64
"""Alignment of every block in bytes: a cache line."""


def place_slots(manifest: Sequence[TensorSpec], load_plan: LoadPlan) -> tuple[int, tuple[Slot, ...]]:
    """Give every tensor a slot. Tensors that form one parameter of the engine are adjacent, in the parameter's order.

    A fused parameter can then be one view of the arena. A slot is always one whole tensor. The parameters of a parallel
    engine consist of pieces of tensors that cannot all be adjacent; these tensors keep the manifest's order.
    `load_plan` is the first worker's.

    Returns:
        The arena's size in bytes, and one slot per tensor, in the manifest's order.

    Raises:
        WeightMismatch: The first worker does not hold a tensor.
    """
    numel = {spec.name: torch.Size(spec.shape).numel() for spec in manifest}
    placed: dict[str, int] = {}
    end = 0
    for name, parts in _by_parameter(load_plan).items():
        if all(is_one_run(part, numel[part.source]) and part.source not in placed for part in parts):
            size = dtype_of(load_plan.dtypes[name]).itemsize
            placed.update({part.source: end + part.parameter_view.offset * size for part in parts})
            end = _aligned(end + load_plan.sizes[name] * size)
    dtypes = {copy.source: load_plan.dtypes[copy.parameter] for copy in load_plan.copies}
    if missing := [spec.name for spec in manifest if spec.name not in dtypes]:
        raise WeightMismatch(
            f"the engine's first worker does not hold {missing[0]!r}: every worker must hold a part of each tensor. "
            "Start the engine without pipeline and expert parallelism."
        )
    for spec in manifest:
        if spec.name not in placed:
            placed[spec.name] = end
            end = _aligned(end + numel[spec.name] * dtype_of(dtypes[spec.name]).itemsize)

    def words(spec: TensorSpec) -> int:
        size = dtype_of(dtypes[spec.name]).itemsize
        return widest_word(size * spec.uncut, size * math.prod(spec.shape[1:])) if spec.uncut else 0

    slots = (
        Slot(spec.name, spec.shape, dtypes[spec.name], placed[spec.name], words(spec)) for spec in manifest
    )
    return max(end, ALIGNMENT), tuple(slots)


def in_rounds(slots: Sequence[Slot], max_bytes: int) -> tuple[int, tuple[Slot, ...]]:
    """Split `slots` into rounds that fill one arena of `max_bytes` (or the size of the largest slot) in sequence.

    Returns:
        The arena's size in bytes, and the slots in their order.
    """
    placed, number, end, num_bytes = [], 0, 0, ALIGNMENT
    for slot in slots:
        if end and end + slot.num_bytes > max_bytes:
            number, end = number + 1, 0
        placed.append(dataclasses.replace(slot, offset_bytes=end, round=number))
        end = _aligned(end + slot.num_bytes)
        num_bytes = max(num_bytes, end)
    return num_bytes, tuple(placed)


def plain_slots(
    manifest: Sequence[TensorSpec], dtype_of_tensor: Callable[[str], str]
) -> tuple[int, tuple[Slot, ...]]:
    """Place tensors one after the other, for engines that copy them out of the arena; returns like `place_slots`.

    `dtype_of_tensor` returns the engine's dtype of a tensor by its name, such as ``bfloat16``.
    """
    return place_slots(manifest, LoadPlan.whole(manifest, dtype_of_tensor))


def find_aliases(load_plan: LoadPlan, slots: Sequence[Slot], num_bytes: int) -> dict[str, int]:
    """Return the first byte of each of a worker's parameters that is one block of the arena of `num_bytes`."""
    by_name = {slot.name: slot for slot in slots}
    aliases = {}
    for name, parts in _by_parameter(load_plan).items():
        dtype, size = load_plan.dtypes[name], dtype_of(load_plan.dtypes[name]).itemsize
        starts = {
            by_name[part.source].offset_bytes + (part.source_view.offset - part.parameter_view.offset) * size
            for part in parts
        }
        start, end = min(starts), min(starts) + load_plan.sizes[name] * size
        one_block = len(starts) == 1 and start >= 0 and end <= num_bytes
        if not one_block or not all(
            is_one_run(part) and by_name[part.source].dtype == dtype for part in parts
        ):
            continue
        # The padding rows of a vocabulary table must not overlap another tensor.
        overlap = sum(
            max(0, min(end, slot.offset_bytes + slot.num_bytes) - max(start, slot.offset_bytes))
            for slot in slots
        )
        if overlap == sum(part.parameter_view.count for part in parts) * size:
            aliases[name] = start
    return aliases


def _by_parameter(load_plan: LoadPlan) -> dict[str, list[Copy]]:
    copies: dict[str, list[Copy]] = defaultdict(list)
    for copy in load_plan.copies:
        copies[copy.parameter].append(copy)
    return copies


def is_one_run(copy: Copy, whole: int | None = None) -> bool:
    """Whether a copy maps one run of the source, or all its `whole` elements, to one run of the parameter."""
    in_order = copy.source_view.is_whole and copy.parameter_view.is_whole
    return in_order and whole in (None, copy.source_view.count)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
