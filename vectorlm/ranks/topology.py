"""Where this process stands among the ranks of a run."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vectorlm.errors import LaunchError

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each rank; a process that has all of them is a rank."""
FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Where the ranks of srun meet: below the ports that Linux gives to outgoing connections, 32768 and up."""


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
    """Where the supervisor looks for this rank's error; None when nothing supervises this process."""
    context_parallel: int = 1
    """How many ranks, neighbours, share the tokens of each pass of the trainer, and so its data."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Topology:
        """Read torchrun's variables, or srun's, from `environment` or ``os.environ``; else this is a lone process.

        Raises:
            LaunchError: The rank lies outside the world, it has no device, or the nodes do not run equally many ranks.
        """
        variables = with_rank_variables(os.environ if environment is None else environment)
        _require_numbers(variables)
        rank = int(variables.get("RANK", 0))
        world_size = int(variables.get("WORLD_SIZE", 1))
        local_rank = int(variables.get("LOCAL_RANK", rank))
        local_world_size = int(variables.get("LOCAL_WORLD_SIZE", world_size))
        if not 0 <= rank < world_size:
            raise LaunchError(f"RANK={rank} lies outside WORLD_SIZE={world_size}: use 0 to {world_size - 1}.")
        num_nodes = int(variables.get("GROUP_WORLD_SIZE", world_size // local_world_size))
        if world_size != num_nodes * local_world_size or rank % local_world_size != local_rank:
            raise LaunchError(
                f"RANK={rank} of WORLD_SIZE={world_size} is LOCAL_RANK={local_rank} of "
                f"LOCAL_WORLD_SIZE={local_world_size}, but every node must run equally many ranks, numbered node by "
                "node. Start torchrun with the same --nproc_per_node on every node, or srun with --ntasks-per-node."
            )
        error_file = variables.get("TORCHELASTIC_ERROR_FILE")
        return cls(rank, local_rank, world_size, local_world_size, device_of(local_rank), error_file)

    @property
    def node(self) -> int:
        """Index of this node, from 0; nodes run equally many ranks."""
        return self.rank // self.local_world_size

    @property
    def num_nodes(self) -> int:
        """Number of nodes in the run."""
        return self.world_size // self.local_world_size

    @property
    def data_share(self) -> int:
        """Index of this rank's share of the data among `num_data_shares`."""
        return self.rank // self.context_parallel

    @property
    def num_data_shares(self) -> int:
        """Number of shares that the data is split into."""
        return self.world_size // self.context_parallel

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which owns the sampler and writes the files."""
        return self.rank == 0

    @property
    def is_cuda(self) -> bool:
        """Whether this rank trains on a CUDA device."""
        return self.device.startswith("cuda")


DRIVER_FILES = ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd")
"""Of NVIDIA's drivers for servers and boards, of WSL's, and of AMD's."""


def is_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun, a launcher that sets the same variables, or srun made this process a rank.

    Raises:
        LaunchError: It is one of several ranks, and a variable that they need to meet is missing.
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

    A torchrun that srun has started set its own. An empty variable counts as missing. With ``env://`` alone, as a
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
    """Return what torchrun would have set for this task of srun; nothing outside srun, or where there is one task.

    Only variables of a step count: the script of sbatch has SLURM_PROCID and SLURM_NTASKS too, and is no task. The
    first task's node holds the store, at MASTER_ADDR and MASTER_PORT where these are set.

    Raises:
        LaunchError: The nodes run different numbers of tasks, or a variable is missing.
    """
    num_tasks, num_nodes = (int(environment.get(f"SLURM_STEP_NUM_{what}", 1)) for what in ("TASKS", "NODES"))
    if num_tasks < 2:
        return {}
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"):
        if name not in environment:
            raise LaunchError(
                f"srun started {num_tasks} tasks, but {name} is not set. Pass SLURM's variables on."
            )
    if num_tasks % num_nodes:
        rule = "every node must run equally many. Use srun --ntasks-per-node."
        raise LaunchError(f"srun started {num_tasks} tasks on {num_nodes} nodes, but {rule}")
    host = "127.0.0.1" if num_nodes == 1 else first_host(environment["SLURM_STEP_NODELIST"])
    # A port of the step's own: another may run on the same node.
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
