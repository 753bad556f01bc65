"""A task of srun as a rank: SLURM's variables in torchrun's words."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vectorlm.errors import LaunchError

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Below the ports that Linux gives to outgoing connections, 32768 and up."""


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
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
