"""What a container allows: the limits of the control groups that this process is in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """What a container allows; None is no limit."""

    memory_bytes: int | None = None
    cores: float | None = None


def container_limits(root: str | Path = "/sys/fs/cgroup", own: str | Path = "/proc/self/cgroup") -> Limits:
    """Read the limits of this process's control group and of the groups around it (cgroup version 2)."""
    memory, cores = [], []
    place = next((line[3:] for line in _read(Path(own)).splitlines() if line.startswith("0::")), None)
    inner = Path(root, place.strip("/")) if place is not None else Path(root)
    for folder in [inner, *inner.parents]:
        if not folder.is_relative_to(root):
            break
        limit, quota = _read(folder / "memory.max").strip(), _read(folder / "cpu.max").split()
        if limit.isdigit():
            memory.append(int(limit))
        if len(quota) == 2 and quota[0].isdigit():
            cores.append(int(quota[0]) / int(quota[1]))
    return Limits(min(memory, default=None), min(cores, default=None))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
