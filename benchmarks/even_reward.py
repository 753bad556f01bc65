"""The reward of rl_step.py, in a file that configs can name; it is called between sampling and the update.

With UPDATE_PEAKS in the environment it also notes in that file what each update took, when the next one begins.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HELD: list[int] = []
"""What the process held before the update that goes on now."""


def even(completions: Sequence[Any], **columns: object) -> list[float]:
    """Reward the share of words with an even checksum, so that the completions of a group differ."""
    path = os.environ.get("UPDATE_PEAKS")
    if path:
        if _HELD:
            with Path(path).open("a") as file:
                file.write(f"{peak_bytes()}\n")
        watch_memory()
    rewards = []
    for completion in completions:
        # TRL answers chats with messages.
        words = (completion if isinstance(completion, str) else completion[-1]["content"]).split()
        num_even = sum(zlib.crc32(word.encode()) % 2 == 0 for word in words)
        rewards.append(num_even / max(len(words), 1))
    return rewards


def watch_memory() -> None:
    """Give free memory back, note what is held, and begin to note the most."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    _HELD[:] = [_memory("VmRSS")]


def peak_bytes() -> int:
    """Return the most that was held since `watch_memory`, beyond what was held then."""
    return _memory("VmHWM") - _HELD[0]


def _memory(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
