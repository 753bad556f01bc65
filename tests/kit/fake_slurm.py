"""Fake `srun` and `scontrol` for a cluster whose nodes are all this machine; put their folder first on PATH."""

import os
import subprocess
import sys
import time
from pathlib import Path

SHIM = f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} $(basename $0) "$@"\n'


def put_on_path(folder, **variables):
    """Write the commands; return a job's environment with their folder on PATH and SLURM's batch-step variables."""
    folder.mkdir()
    for name in ("srun", "scontrol"):
        (folder / name).write_text(SHIM)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **job, "PATH": path, "OMP_NUM_THREADS": "1", **variables}


def run(arguments):
    """Run a command as `--ntasks-per-node` tasks on each node; a task that fails ends the others."""
    first = next(place for place, argument in enumerate(arguments) if not argument.startswith("--"))
    given = dict(argument.removeprefix("--").split("=") for argument in arguments[:first])
    # srun does not take it from sbatch.
    assert given.get("cpus-per-task") == os.environ.get("SLURM_CPUS_PER_TASK")
    num_nodes = int(os.environ["SLURM_NNODES"])
    each_node = int(given.get("ntasks-per-node", 1))
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_STEP_NUM_TASKS": str(num_nodes * each_node),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
    }
    tasks = []
    for rank in range(num_nodes * each_node):
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % each_node)}
        place["SLURM_NODEID"] = str(rank // each_node)
        tasks.append(subprocess.Popen(arguments[first:], env={**os.environ, **step, **place}))
    while None in (codes := [task.poll() for task in tasks]):
        if any(codes):
            for task in tasks:
                task.terminate()
            return 1
        time.sleep(0.1)
    return max(map(abs, codes))


if __name__ == "__main__":
    _, command, *rest = sys.argv
    if command == "scontrol":
        assert rest == ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        print(rest[2].replace(",", "\n"))
        sys.exit(0)
    sys.exit(run(rest))
