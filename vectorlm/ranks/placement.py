"""Which devices of a node are the trainer's, and which are the engine's alone."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Placement:
    """How a node is divided between ranks and engine: its CUDA devices, or its cores where there are none."""

    trainer: tuple[int, ...]
    """Devices or cores of the ranks."""
    engine: tuple[int, ...]
    """Devices of the engine, numbered as the ranks number them, or its cores, numbered as the kernel does."""


def split_node(topology: Topology, num_for_engine: int | None = None) -> Placement:
    """Divide this node between its ranks and their engine, which takes the devices behind theirs or the last cores.

    Without `num_for_engine` the engine takes one device, or half of the cores. Raises `ConfigError` if the node has too
    few.
    """
    if topology.is_cuda:
        import torch

        num_ranks, num_for_engine = topology.local_world_size, num_for_engine or 1
        if num_ranks + num_for_engine > torch.cuda.device_count():
            raise ConfigError(
                f"rl.async.placement='split' needs {num_ranks} devices for the ranks and {num_for_engine} for the "
                f"engine, but this node has {torch.cuda.device_count()}. Start fewer ranks, or use placement: shared."
            )
        return Placement(tuple(range(num_ranks)), tuple(range(num_ranks, num_ranks + num_for_engine)))
    cores = sorted(os.sched_getaffinity(0))
    num_for_engine = num_for_engine or len(cores) // 2
    if not 0 < num_for_engine < len(cores):
        raise ConfigError(
            f"rl.async.placement='split' cannot give {num_for_engine} of {len(cores)} cores to the engine: each side "
            "needs at least one. Set rl.async.engine_devices, or use placement: shared."
        )
    return Placement(tuple(cores[:-num_for_engine]), tuple(cores[-num_for_engine:]))


def set_affinity(cores: Sequence[int]) -> None:
    """Keep all present and later threads of this process on `cores`."""
    for thread in Path("/proc/self/task").iterdir():
        # A thread may end after it was listed.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def share_cores(topology: Topology) -> None:
    """Divide the cores of this node among its ranks' torch threads, unless OMP_NUM_THREADS is set.

    More threads than cores wait for each other in loops, and a step takes ten times as long.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // topology.local_world_size))


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Collect no garbage while a process imports: torch, transformers and vLLM make a million objects that all stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def bounded_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that bounds how long OpenMP's threads wait in a loop before they sleep.

    libgomp's own limit of 300000 rounds is for machines without other work: a thread that waits for one that another
    process has displaced keeps the core that this one needs. With few rounds, threads that have nothing to do for a
    moment sleep and must be woken. benchmarks/results/busy.json has a step by the limit, alone and beside a busy
    process.
    Only processes that start with the variable read it. What the user has set wins.
    """
    return (
        {}
        if "OMP_WAIT_POLICY" in environment
        else {"GOMP_SPINCOUNT": environment.get("GOMP_SPINCOUNT", "10000")}
    )


def on_loopback() -> dict[str, str]:
    """Return the variables that keep the ports of gloo and vLLM, which ask nobody for a password, on this machine.

    Without them both listen on the address that the host's name resolves to.
    """
    has_lo = "lo" in {name for _, name in socket.if_nameindex()}
    return {"VLLM_HOST_IP": LOOPBACK, **({"GLOO_SOCKET_IFNAME": "lo"} if has_lo else {})}


def tensor_parallel_size(num_devices: int, num_heads: int, weight_bytes: int, room_bytes: float) -> int:
    """Return on how few of the devices an engine's weights take at most half of its room, which the rest caches in.

    The result divides the devices, and the model's query heads, as vLLM wants it.
    """
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == num_heads % size == 0]
    return next((size for size in sizes if weight_bytes <= size * room_bytes / 2), sizes[-1])


def devices_of_engine(
    devices: Sequence[int] | None, num_engines: int, topology: Topology
) -> Sequence[int] | None:
    """Return the devices of this rank's engine, out of the `devices` that the engines of a node divide."""
    if devices is None:
        return None
    if not devices or len(devices) % num_engines:
        raise ValueError(
            f"devices={list(devices)!r} cannot be shared by {num_engines} engines. Use a multiple of {num_engines}."
        )
    per_engine = len(devices) // num_engines
    first = topology.local_rank * num_engines // topology.local_world_size * per_engine
    return devices[first : first + per_engine]
