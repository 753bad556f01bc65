"""The reward of rl_step.py, in a file that configs can name; it is called between sampling and the update.

With UPDATE_PEAKS in the environment it also notes in that file what each update took, when the next one begins.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

_HELD: list[int] = []
"""What the process held before the update that goes on now."""


def even(completions: Sequence[str], **columns: object) -> list[float]:
    """Reward the share of even tokens, so that the completions of a group differ."""
    path = os.environ.get("UPDATE_PEAKS")
    if path:
        if _HELD:
            with Path(path).open("a") as file:
                file.write(f"{peak_bytes()}\n")
        watch_memory()
    rewards = []
    for text in completions:
        tokens = text.split()
        even_tokens = sum(int(token) % 2 == 0 for token in tokens if token.isdigit())
        rewards.append(even_tokens / max(len(tokens), 1))
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
