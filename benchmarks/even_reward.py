"""The reward function of rl_step.py, in a file that configs can name.

It is called between sampling and the update. If the environment variable UPDATE_PEAKS names a file, each call appends
the peak memory of the previous update to it.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HELD: list[int] = []
"""Bytes that the process held before the current update; empty before the first one."""


def even(completions: Sequence[Any], **columns: object) -> list[float]:
    """Return the share of words with an even checksum, which differs between the completions of a group."""
    path = os.environ.get("UPDATE_PEAKS")
    if path:
        if _HELD:
            with Path(path).open("a") as file:
                file.write(f"{peak_bytes()}\n")
        watch_memory()
    rewards = []
    for completion in completions:
        # TRL passes messages if the prompt is a chat.
        words = (completion if isinstance(completion, str) else completion[-1]["content"]).split()
        num_even = sum(zlib.crc32(word.encode()) % 2 == 0 for word in words)
        rewards.append(num_even / max(len(words), 1))
    return rewards


def watch_memory() -> None:
    """Return free memory to the system, note the memory in use, and reset its peak."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    _HELD[:] = [_memory("VmRSS")]


def peak_bytes() -> int:
    """Return the peak memory since `watch_memory` minus the memory in use then, in bytes."""
    return _memory("VmHWM") - _HELD[0]


def _memory(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
