"""Export a rank's tensors: handles that the engines of its node open to read the tensors in place."""

from __future__ import annotations

import ctypes
import functools
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vectorlm.errors import HandleRefused, StaleHandle
from vectorlm.sampling.weights.arena import Arena, path_of
from vectorlm.sampling.weights.inspection import row_sums
from vectorlm.sampling.weights.module_source import HeldBox, ModuleSource
from vectorlm.sampling.weights.plan import Layout, dtype_name, dtype_of


@dataclass(frozen=True)
class FileHandle:
    """A handle of a tensor in host memory, a piece of an anonymous file that its process has open."""

    path: str
    """The file's entry in ``/proc``."""
    identity: tuple[int, int]
    """Device and inode of the file. They detect that the process reused the descriptor for another file."""
    num_bytes: int
    """Size of the file."""
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> FileHandle:
        """Move the storage of a tensor into shared memory, if it is not there; return its handle.

        All tensors on that storage keep their values, at another address. torch keeps one descriptor per storage.
        """
        descriptor, num_bytes = tensor.untyped_storage()._share_fd_cpu_()
        return cls._at(path_of(descriptor), num_bytes, tensor)

    @classmethod
    def in_arena(cls, arena: Arena, tensor: torch.Tensor) -> FileHandle:
        """Return the handle of a view of `arena`, which is in shared memory already."""
        return cls._at(arena.path, arena.bytes.nbytes, tensor)

    @classmethod
    def _at(cls, path: str, num_bytes: int, tensor: torch.Tensor) -> FileHandle:
        status = os.stat(path)
        start = int(tensor.storage_offset()) * tensor.element_size()
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        identity = status.st_dev, status.st_ino
        return cls(path, identity, num_bytes, start, shape, stride, dtype_name(tensor.dtype))

    def check(self) -> None:
        """Raise `StaleHandle` if the process has ended or its descriptor is another file's."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise StaleHandle(f"{self.path} is closed: its rank has ended, or has released it.") from error
        if (status.st_dev, status.st_ino) != self.identity:
            raise StaleHandle(f"{self.path} is not the file that was exported.")

    def open(self) -> torch.Tensor:
        """Map and return the tensor of the other process; raise `StaleHandle` as `check` does."""
        return self.view(self.map())

    def map(self, is_shared: bool = True) -> torch.Tensor:
        """Map the whole file as uint8 [num_bytes]; raise `StaleHandle` as `check` does.

        Unless `is_shared`, the other process never sees what this process writes there.
        """
        self.check()
        with open(self.path, "rb+", buffering=0) as file:
            # Checks the open file, which can no longer be exchanged.
            mine = replace(self, path=f"/proc/self/fd/{file.fileno()}")
            mine.check()
            storage = torch.UntypedStorage.from_file(mine.path, is_shared, self.num_bytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the tensor in `raw`, the result of `map`."""
        dtype = dtype_of(self.dtype)
        whole = raw[: self.num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(self.shape, self.stride, self.offset_bytes // dtype.itemsize)

    def close(self, opened: torch.Tensor) -> None:
        """Do nothing: the mapping ends with the last tensor on it."""


@dataclass(frozen=True)
class DeviceHandle:
    """A handle of a tensor on a CUDA device, which the exporting rank keeps."""

    device: str
    """The device's UUID, because processes may number devices differently."""
    allocation: bytes
    """CUDA's handle of the tensor's allocation."""
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> DeviceHandle:
        """Return the handle of a tensor, which does not move; raise `HandleRefused` if CUDA refuses."""
        allocation, offset_bytes = export_memory(tensor.data_ptr())
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(_uuid(tensor.device), allocation, offset_bytes, shape, stride, dtype_name(tensor.dtype))

    def is_on(self, device: torch.device) -> bool:
        """Whether the tensor is on this device of the calling process."""
        return self.device == _uuid(device)

    def check(self) -> None:
        """Do nothing: CUDA cannot check, and ranks export tensors again after they move."""

    def open(self) -> torch.Tensor:
        """Map the tensor for this process's device; raise `HandleRefused` if CUDA refuses.

        Copies are then kernels of this device. Kernels of the tensor's device could not write to parameters in vLLM's
        sleep mode, which maps them for their own device only.
        """
        visible = [_uuid(index) for index in range(torch.cuda.device_count())]
        if self.device not in visible:
            raise HandleRefused(
                f"a rank's weights are on the device {self.device}, which the engine's process cannot see. Use the "
                "same CUDA_VISIBLE_DEVICES for both, or transport='bucketed'."
            )
        own = torch.device("cuda", torch.cuda.current_device())
        dtype = dtype_of(self.dtype)
        return tensor_at(map_memory(self.allocation), self.offset_bytes, self.shape, self.stride, dtype, own)

    def close(self, opened: torch.Tensor) -> None:
        """Unmap the tensor that `open` returned; it must not be read any more."""
        unmap_memory(opened.untyped_storage().data_ptr())


def tensor_at(
    pointer: int,
    offset_bytes: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return a tensor at `pointer` that `device` can read; the caller keeps the memory alive."""
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    num_bytes = offset_bytes + (reach + 1) * dtype.itemsize
    # Without `device`, torch would take the device of the memory.
    storage = torch._C._construct_storage_from_data_pointer(pointer, device, num_bytes)
    flat = torch.empty(0, dtype=dtype, device=device)
    return flat.set_(storage, offset_bytes // dtype.itemsize, shape, stride)  # type: ignore[call-overload]


Handle = FileHandle | DeviceHandle


@dataclass(frozen=True)
class Export:
    """An exported block of one tensor."""

    name: str
    """The tensor's name in the trainer."""
    place: tuple[int, ...]
    """Index of its first element in the whole tensor, by dimension."""
    handle: Handle
    """The handle of the block, in the trainer's dtype."""


@dataclass(frozen=True)
class Lent:
    """The tensors of an engine's base that ranks may read in place."""

    pid: int
    """The process that owns the memory."""
    exports: Sequence[Export]
    """An export of each tensor that is one contiguous run of a parameter."""
    computed: frozenset[str]
    """Tensors of which the engine keeps only results that its loader computed."""


class ExportedRows:
    """A rank's exported rows of one weight set; it keeps them and their memory until a tensor moves.

    Shards are exported in place. Computed rows (merged LoRA) get a staging buffer in the engine's dtype, which every
    update fills.
    """

    def __init__(self, writes: Mapping[str, Sequence[HeldBox]], layout: Layout) -> None:
        """Export the rows; on CPU this moves their storages into shared memory."""
        dtypes = {slot.name: dtype_of(slot.dtype) for slot in layout.slots}
        self._staged = {
            (name, index): torch.empty(write.rows.shape, dtype=dtypes.get(name), device=write.rows.device)
            for name, index, write in _numbered(writes)
            if write.change is not None
        }
        rows = {(name, index): write.rows for name, index, write in _numbered(writes)} | self._staged
        self.exports: Sequence[Export] = [
            Export(name, write.sent_place, (DeviceHandle if held.is_cuda else FileHandle).of(held))
            for (name, _, write), held in zip(_numbered(writes), rows.values(), strict=True)
            if write.rows.numel()
        ]
        # While these are alive, no other tensor can get their addresses.
        self._kept: list[Any] = [rows, writes]
        self._places = _places(writes)

    def are_current(self, writes: Mapping[str, Sequence[HeldBox]]) -> bool:
        """Whether the exports are still the rows to send."""
        if writes is not self._kept[1] and self._places == _places(writes):
            self._kept[1] = writes
        return writes is self._kept[1]

    def publish(self, source: ModuleSource, layout: Layout, with_checksums: bool) -> Sequence[int]:
        """Fill the staging buffers, one tensor at a time, and return the checksums of all rows as they are sent."""
        sums: dict[str, list[tuple[torch.Tensor, int]]] = defaultdict(list)
        words = {slot.name: slot.word_bytes for slot in layout.slots} if self._staged else {}
        for (name, index), staged in self._staged.items():
            if name in words:
                write = source.writes[name][index]
                assert write.change is not None
                staged.copy_(write.change(write.rows))
                if with_checksums:
                    sums[name].append((row_sums(staged, words[name]), write.first_row))
        return source.checksums_of(layout, sums) if with_checksums else []


def _numbered(writes: Mapping[str, Sequence[HeldBox]]) -> Iterator[tuple[str, int, HeldBox]]:
    """Yield every block with the name of its tensor and its number there."""
    for name, boxes in writes.items():
        yield from ((name, index, box) for index, box in enumerate(boxes))


def _places(writes: Mapping[str, Sequence[HeldBox]]) -> list[tuple[Any, ...]]:
    """Return where the rows of every block are, in memory and in the whole tensor."""
    return [
        (
            name,
            None if write.change is not None else (rows.data_ptr(), rows.dtype, rows.stride()),
            rows.shape,
            write.sent_place,
        )
        for name, _, write in _numbered(writes)
        for rows in (write.rows,)
    ]


def _uuid(device: int | torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


LAZY_PEER_ACCESS = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``: memory may be mapped for another device than its own."""


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``, the handle of a whole allocation."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


@functools.cache
def driver() -> Any:
    """Return CUDA's driver library, which torch has initialised."""
    return ctypes.CDLL("libcuda.so.1")


def export_memory(pointer: int) -> tuple[bytes, int]:
    """Return a handle of the allocation of `pointer`, and the offset of `pointer` in bytes.

    torch's own handles count their receivers and never free memory whose receiver was killed.
    """
    start, handle = ctypes.c_uint64(), IpcHandle()
    _call("cuMemGetAddressRange_v2", ctypes.byref(start), None, ctypes.c_uint64(pointer))
    _call("cuIpcGetMemHandle", ctypes.byref(handle), start)
    return bytes(handle), pointer - start.value


def map_memory(handle: bytes) -> int:
    """Map the allocation of another process for the current device, counting its users; return the address."""
    pointer = ctypes.c_uint64()
    mine = IpcHandle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), mine, ctypes.c_uint(LAZY_PEER_ACCESS))
    return pointer.value


def unmap_memory(pointer: int) -> None:
    """Release one use of the allocation at `pointer`; the last one unmaps it."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))


def _call(name: str, *arguments: Any) -> None:
    code = getattr(driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"unknown").decode()
        raise HandleRefused(f"CUDA's driver refused {name}: {reason} (error {code}).")
