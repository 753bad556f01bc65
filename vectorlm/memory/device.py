"""How much memory there is."""

from __future__ import annotations

from pathlib import Path

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory_bytes() -> int:
    """Return the memory of this machine, or of the container that we run in where that is less."""
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    limits = [Path(path).read_text().strip() for path in CGROUP_LIMITS if Path(path).is_file()]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def device_memory_bytes() -> int | None:
    """Return the memory of this machine's smallest CUDA device; None without one, and then torch is not loaded."""
    if not Path("/dev/nvidia0").exists():
        return None
    import torch

    totals = [
        torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())
    ]
    return min(totals, default=None)
