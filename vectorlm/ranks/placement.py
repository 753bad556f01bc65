"""Which devices of a node are the trainer's, and which are the engine's alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology


@dataclass(frozen=True)
class Placement:
    """Two shares of a node that have no device in common: CUDA devices, or cores where there are none."""

    trainer: tuple[int, ...]
    """Of the ranks."""
    engine: tuple[int, ...]
    """Of the engine; on CUDA as the ranks count devices, on CPU as the kernel counts cores."""


def split_node(topology: Topology, num_for_engine: int | None = None) -> Placement:
    """Divide this node between its ranks and their engine.

    On CUDA each rank has a device and the engine has those behind them. On CPU the engine has the last cores.

    Args:
        topology: This rank's place.
        num_for_engine: Devices or cores for the engine; one device, or half of the cores, when omitted.

    Raises:
        ConfigError: There are not so many.
    """
    if topology.is_cuda:
        import torch

        return _split_devices(topology.local_world_size, num_for_engine or 1, torch.cuda.device_count())
    cores = sorted(os.sched_getaffinity(0))
    return _split_cores(cores, num_for_engine or len(cores) // 2)


def settle(cores: Sequence[int]) -> None:
    """Have every thread of this process compute on `cores` alone, and those that come later."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def share_cores(topology: Topology) -> None:
    """Have torch compute with as many threads as this rank has cores, unless the environment names a number.

    More threads than cores wait for each other in loops, and a step takes ten times as long.

    Args:
        topology: The ranks on this node divide among them the cores that this process may use.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // topology.local_world_size))


def devices_of_engine(
    devices: Sequence[int] | None, num_engines: int, topology: Topology
) -> Sequence[int] | None:
    """Return this rank's engine's part of the `devices` that a node's engines have for themselves; None for None.

    Raises:
        ValueError: They cannot be divided among the engines.
    """
    if devices is None:
        return None
    if not devices or len(devices) % num_engines:
        raise ValueError(
            f"devices={list(devices)!r} cannot be shared by {num_engines} engines: each needs as many, at least one."
        )
    per_engine = len(devices) // num_engines
    first = topology.local_rank * num_engines // topology.local_world_size * per_engine
    return devices[first : first + per_engine]


def _split_devices(num_ranks: int, num_for_engine: int, num_there: int) -> Placement:
    if num_ranks + num_for_engine > num_there:
        raise ConfigError(
            f"rl.async.placement='split' needs {num_ranks} devices for the ranks and {num_for_engine} for the engine, "
            f"but this node has {num_there}. Start fewer ranks, or use placement: shared."
        )
    return Placement(tuple(range(num_ranks)), tuple(range(num_ranks, num_ranks + num_for_engine)))


def _split_cores(cores: Sequence[int], num_for_engine: int) -> Placement:
    if not 0 < num_for_engine < len(cores):
        raise ConfigError(
            f"rl.async.placement='split' cannot give {num_for_engine} of {len(cores)} cores to the engine: each side "
            "needs one at least. Set rl.async.engine_devices, or use placement: shared."
        )
    return Placement(tuple(cores[:-num_for_engine]), tuple(cores[-num_for_engine:]))
