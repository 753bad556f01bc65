"""Memory of a CUDA device that another process reads, by handles of CUDA's driver."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from vectorlm.errors import HandleRefused

LAZY_PEER_ACCESS = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``: the memory may lie on another device than the one it is mapped for."""


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``: leads another process to a whole allocation."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


@functools.cache
def driver() -> Any:
    """Return CUDA's driver library; torch has initialised it."""
    return ctypes.CDLL("libcuda.so.1")


def export_memory(pointer: int) -> tuple[bytes, int]:
    """Return a handle of the allocation that `pointer` lies in, and how many bytes it lies behind the start.

    torch's own handles count their receivers, and keep the memory of a sampler process that was killed for ever.
    """
    start, handle = ctypes.c_uint64(), IpcHandle()
    _call("cuMemGetAddressRange_v2", ctypes.byref(start), None, ctypes.c_uint64(pointer))
    _call("cuIpcGetMemHandle", ctypes.byref(handle), start)
    return bytes(handle), pointer - start.value


def map_memory(handle: bytes) -> int:
    """Return where the allocation of another process lies for the current device of this one; count it as used."""
    pointer = ctypes.c_uint64()
    mine = IpcHandle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), mine, ctypes.c_uint(LAZY_PEER_ACCESS))
    return pointer.value


def unmap_memory(pointer: int) -> None:
    """Count the allocation at `pointer` as used once less; the last user unmaps it."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))


def _call(name: str, *arguments: Any) -> None:
    code = getattr(driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"unknown").decode()
        raise HandleRefused(f"CUDA's driver refused {name}: {reason} (error {code}).")
