"""A process's place in the run: its rank, and the devices, cores and addresses that it uses."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vectorlm.errors import ConfigError, LaunchError

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for each rank; a process with all of them is a rank."""
FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Range of MASTER_PORT under srun, below Linux's ports for outgoing connections (32768 and up)."""


@dataclass(frozen=True)
class Topology:
    """One rank's place in the run; a lone process is rank 0 of 1."""

    rank: int = 0
    """Index of this process among all ranks, from 0."""
    local_rank: int = 0
    """Index of this process among the ranks of its node, from 0."""
    world_size: int = 1
    """Number of ranks in the run."""
    local_world_size: int = 1
    """Number of ranks on this node."""
    device: str = "cpu"
    """The device that this rank trains on, as torch spells it: ``cpu`` or ``cuda:<local_rank>``."""
    error_file: str | None = None
    """The file for this rank's error; None if no supervisor reads it."""
    context_parallel: int = 1
    """Number of neighbouring ranks that share the tokens of one pass, and therefore the data."""
    model_parallel: int = 1
    """Number of neighbouring ranks that share one copy of the split layers, and therefore the data."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Topology:
        """Read torchrun's variables, or srun's, from `environment` or ``os.environ``; else this is a lone process.

        Raises:
            LaunchError: The rank is outside the world or has no device, or the nodes run different numbers of ranks.
        """
        variables = with_rank_variables(os.environ if environment is None else environment)
        _require_numbers(variables)
        rank = int(variables.get("RANK", 0))
        world_size = int(variables.get("WORLD_SIZE", 1))
        local_rank = int(variables.get("LOCAL_RANK", rank))
        local_world_size = int(variables.get("LOCAL_WORLD_SIZE", world_size))
        if not 0 <= rank < world_size:
            raise LaunchError(
                f"RANK={rank} must be below WORLD_SIZE={world_size}: use 0 to {world_size - 1}."
            )
        num_nodes = int(variables.get("GROUP_WORLD_SIZE", world_size // local_world_size))
        if world_size != num_nodes * local_world_size or rank % local_world_size != local_rank:
            raise LaunchError(
                f"RANK={rank} of WORLD_SIZE={world_size} is LOCAL_RANK={local_rank} of "
                f"LOCAL_WORLD_SIZE={local_world_size}, but all nodes must run the same number of ranks, numbered node "
                "by node. Start torchrun with the same --nproc_per_node on every node, or srun with --ntasks-per-node."
            )
        error_file = variables.get("TORCHELASTIC_ERROR_FILE")
        return cls(rank, local_rank, world_size, local_world_size, device_of(local_rank), error_file)

    @classmethod
    def of_process_group(cls, device: str) -> Topology:
        """Read torch's default process group on one node, from any launcher; without a group this is a lone process.

        Other libraries change the launcher's variables: vLLM sets LOCAL_WORLD_SIZE in the process of a ``vllm.LLM``.

        Raises:
            LaunchError: The launcher started several ranks, and there is no group.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", 1)) > 1:
                rule = "but there is no process group. Call torch.distributed.init_process_group() first."
                raise LaunchError(f"WORLD_SIZE={os.environ['WORLD_SIZE']} ranks were started, {rule}")
            return cls(device=device)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return cls(rank, rank, world_size, world_size, device)

    @property
    def node(self) -> int:
        """Index of this node, from 0; nodes run equally many ranks."""
        return self.rank // self.local_world_size

    @property
    def num_nodes(self) -> int:
        """Number of nodes in the run."""
        return self.world_size // self.local_world_size

    @property
    def ranks_per_share(self) -> int:
        """Number of neighbouring ranks that train on the same rows."""
        return self.context_parallel * self.model_parallel

    @property
    def data_share(self) -> int:
        """Index of this rank's share of the data among `num_data_shares`."""
        return self.rank // self.ranks_per_share

    @property
    def num_data_shares(self) -> int:
        """Number of shares that the data is split into."""
        return self.world_size // self.ranks_per_share

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which owns the sampler and writes the files."""
        return self.rank == 0

    @property
    def is_cuda(self) -> bool:
        """Whether this rank trains on a CUDA device."""
        return self.device.startswith("cuda")


DRIVER_FILES = ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd")
"""Device files of NVIDIA's drivers for servers and boards, of WSL's driver, and of AMD's."""


def is_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun, a launcher that sets the same variables, or srun made this process a rank.

    Raises:
        LaunchError: It is one of several ranks, and a variable that they need to connect is missing.
    """
    variables = with_rank_variables(os.environ if environment is None else environment)
    _require_numbers(variables)
    missing = [name for name in RANK_VARIABLES if name not in variables]
    if missing and int(variables.get("WORLD_SIZE", 1)) > 1:
        raise LaunchError(
            f"WORLD_SIZE={variables['WORLD_SIZE']} makes this process one of several ranks, and {', '.join(missing)} "
            "must be set too. Set them all, or unset WORLD_SIZE."
        )
    return not missing


def with_rank_variables(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables with torchrun's added, in a task of srun and in a process of torch's ``env://``.

    A torchrun under srun has set its own. An empty variable counts as missing. With ``env://`` alone, as a
    PyTorchJob sets it, there is one rank on each node.
    """
    set_here = {name: value for name, value in environment.items() if value or name not in RANK_VARIABLES}
    if all(name in set_here for name in RANK_VARIABLES):
        return set_here
    if all(name in set_here for name in RANK_VARIABLES if name != "LOCAL_RANK"):
        return {**set_here, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**set_here, **srun_variables(environment)}


def _require_numbers(variables: Mapping[str, str]) -> None:
    """Raise `LaunchError` if a variable holds no number."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        if not variables.get(name, "0").isdecimal():
            raise LaunchError(f"{name}={variables[name]!r} must be an integer >= 0. Correct it, or unset it.")


def srun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set for this task of srun; none outside srun or for a single task.

    Only variables of a step count: the script of sbatch has SLURM_PROCID and SLURM_NTASKS too, and is not a task. The
    first task's node holds the store, at MASTER_ADDR and MASTER_PORT if these are set.

    Raises:
        LaunchError: The nodes run different numbers of tasks, or a variable is missing.
    """
    num_tasks, num_nodes = (int(environment.get(f"SLURM_STEP_NUM_{what}", 1)) for what in ("TASKS", "NODES"))
    if num_tasks < 2:
        return {}
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"):
        if name not in environment:
            raise LaunchError(
                f"srun started {num_tasks} tasks, but {name} is not set. Pass SLURM's variables to all tasks."
            )
    if num_tasks % num_nodes:
        rule = "all nodes must run the same number of tasks. Use srun --ntasks-per-node."
        raise LaunchError(f"srun started {num_tasks} tasks on {num_nodes} nodes, but {rule}")
    host = "127.0.0.1" if num_nodes == 1 else first_host(environment["SLURM_STEP_NODELIST"])
    # Each step has its own port, because another step may run on the same node.
    job, step = (int(environment.get(f"SLURM_{what}_ID", 0)) for what in ("JOB", "STEP"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_WORLD_SIZE": str(num_tasks // num_nodes),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "MASTER_ADDR": environment.get("MASTER_ADDR", host),
        "MASTER_PORT": environment.get("MASTER_PORT", str(FIRST_PORT + (job * 17 + step) % NUM_PORTS)),
    }


def first_host(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it: ``gpu[03-05,9],login`` begins with ``gpu03``."""
    found = re.match(r"([^,\[\]]+)(?:\[(\d+)[^\]]*\])?([^,\[\]]*)", nodes)
    if found is None:
        raise LaunchError(
            f"SLURM_STEP_NODELIST={nodes!r} names no node. Set MASTER_ADDR to the first of them."
        )
    return "".join(part or "" for part in found.groups())


def has_gpu() -> bool:
    """Return whether torch has a CUDA device to run on; torch is imported only if a driver has a device file."""
    if "torch" not in sys.modules and not any(any(Path("/dev").glob(name)) for name in DRIVER_FILES):
        return False  # importing torch to find the same would delay the start of the engine by seconds
    import torch

    return torch.cuda.is_available()


def device_of(local_rank: int) -> str:
    """Return the device of a rank; raise `LaunchError` on a CUDA machine that has too few."""
    if not has_gpu():
        return "cpu"
    import torch

    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"rank {local_rank} of this machine has no device: every rank needs its own, and there are "
            f"{torch.cuda.device_count()}. Start at most {torch.cuda.device_count()} ranks (--world_size, or "
            "--nproc_per_node of torchrun)."
        )
    return f"cuda:{local_rank}"


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Placement:
    """The division of a node between ranks and engine: of its CUDA devices, or of its cores if it has none."""

    trainer: tuple[int, ...]
    """Devices or cores of the ranks."""
    engine: tuple[int, ...]
    """Devices of the engine, numbered as the ranks number them, or its cores, numbered as the kernel does."""


def split_node(topology: Topology, num_for_engine: int | None = None) -> Placement:
    """Divide this node between its ranks and their engine, which gets the devices after theirs or the last cores.

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

    With more threads than cores a step takes ten times as long, because threads wait for each other in loops.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // topology.local_world_size))


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Options of glibc's ``mallopt``."""


@contextlib.contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Let glibc keep freed memory for the next large tensor; return all of it at the end.

    By default glibc returns each large tensor to the system, and the next one costs a page fault for every 4 KiB. The
    user's own malloc settings win. Other C libraries have no ``mallopt``, and stay as they are.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    library = ctypes.CDLL(None)
    if is_set or not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(M_MMAP_MAX, 0)
    library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        # glibc's defaults.
        library.mallopt(M_MMAP_MAX, 65536)
        library.mallopt(M_TRIM_THRESHOLD, 128 << 10)
        return_freed_memory()


def return_freed_memory() -> None:
    """Let glibc return freed memory to the system, as far as it can; other C libraries decide by themselves."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Turn the garbage collector off during imports: torch and vLLM allocate a million objects that stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def bounded_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that bounds how long OpenMP's threads wait in a loop before they sleep.

    libgomp's limit of 300000 rounds suits machines without other work. On busy machines a waiting thread keeps the core
    that the thread it waits for needs. With too few rounds, threads sleep at short breaks and must be woken.
    benchmarks/results/busy.json has the time of a step by the limit, alone and next to a busy process. Only processes
    that start with the variable read it. The user's value wins.
    """
    return (
        {}
        if "OMP_WAIT_POLICY" in environment
        else {"GOMP_SPINCOUNT": environment.get("GOMP_SPINCOUNT", "10000")}
    )


def on_loopback() -> dict[str, str]:
    """Return the variables that keep the ports of gloo and vLLM, which have no password, on this machine.

    Otherwise both listen on the address that the host's name resolves to.
    """
    has_lo = "lo" in {name for _, name in socket.if_nameindex()}
    return {"VLLM_HOST_IP": LOOPBACK, **({"GLOO_SOCKET_IFNAME": "lo"} if has_lo else {})}


def tensor_parallel_size(num_devices: int, num_heads: int, weight_bytes: int, room_bytes: float) -> int:
    """Return the smallest number of devices on which the weights fill at most half of the engine's memory.

    The rest of the memory is KV cache. The result divides the number of devices and of query heads, as vLLM requires.
    """
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == num_heads % size == 0]
    return next((size for size in sizes if weight_bytes <= size * room_bytes / 2), sizes[-1])


def devices_of_engine(
    devices: Sequence[int] | None, num_engines: int, topology: Topology
) -> Sequence[int] | None:
    """Return the devices of this rank's engine: its share of the `devices` of the node's engines."""
    if devices is None:
        return None
    if not devices or len(devices) % num_engines:
        raise ValueError(
            f"devices={list(devices)!r} cannot be shared by {num_engines} engines. Use a multiple of {num_engines}."
        )
    per_engine = len(devices) // num_engines
    first = topology.local_rank * num_engines // topology.local_world_size * per_engine
    return devices[first : first + per_engine]
