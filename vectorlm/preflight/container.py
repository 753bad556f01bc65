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
    """Read the limits of this process's control group and of those around it, of version 2 or 1."""
    memory, cores = [], []
    for line in _read(Path(own)).splitlines():
        _, controllers, place = line.split(":", 2)
        top = Path(root, *([controllers] if controllers and not controllers.startswith("name=") else []))
        inner = top / place.strip("/")
        for folder in [inner, *inner.parents]:
            if not folder.is_relative_to(top):
                break
            for name in ("memory.max", "memory.limit_in_bytes"):
                memory += [int(text) for text in _read(folder / name).split() if text.isdigit()]
            quota = _read(folder / "cpu.max").split() or [
                *_read(folder / "cpu.cfs_quota_us").split(),
                *_read(folder / "cpu.cfs_period_us").split(),
            ]
            if len(quota) == 2 and quota[0].isdigit():
                cores.append(int(quota[0]) / int(quota[1]))
    # Version 1 writes "no limit" as nearly 2^63.
    return Limits(min((x for x in memory if x < 1 << 60), default=None), min(cores, default=None))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
