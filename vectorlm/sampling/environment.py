"""The variables that a sampler process starts with."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from vectorlm.ranks.placement import bounded_spin, on_loopback
from vectorlm.ranks.process_end import without_tracker_warnings
from vectorlm.ranks.topology import Topology

CORES_VARIABLE = "VECTORLM_SAMPLER_CORES"
"""The cores that only the sampler process uses, if there are any."""
TRAINER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TRAINER_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "GROUP_", "ROLE_", "SLURM_STEP_")


def sampler_environment(
    trainer: Mapping[str, str],
    scratch: str,
    topology: Topology,
    ranks_per_engine: int | None = None,
    num_workers: int = 1,
    devices: Sequence[int] | None = None,
    dtype: str = "auto",
) -> dict[str, str]:
    """Return the sampler's variables: the trainer's without its place in the run, plus what starts vLLM fast.

    What the user has set wins, except where vLLM would then not run in one process, and except one thread under a
    launcher: torchrun sets that where there are several ranks, but while the sampler works the ranks wait. Engines
    that share a node, and the workers of a parallel engine, share its cores. On CUDA an engine computes on the first
    devices that it sees, those of its ranks or `devices`; it sees the others of the node's ranks to pull weights from.
    """
    kept = {
        name: value
        for name, value in trainer.items()
        if name not in TRAINER_VARIABLES and not name.startswith(TRAINER_PREFIXES)
    }
    if (
        "TORCHELASTIC_RUN_ID" in trainer
        and topology.local_world_size > 1
        and kept.get("OMP_NUM_THREADS") == "1"
    ):
        del kept["OMP_NUM_THREADS"]
    defaults = vllm_variables(trainer, on_cpu=not topology.is_cuda)
    of_engine = ranks_per_engine or topology.local_world_size
    if topology.is_cuda:
        own = range(topology.local_rank, topology.local_rank + of_engine) if devices is None else devices
        places = list(dict.fromkeys([*own, *range(topology.local_world_size)]))
        visible = kept.get("CUDA_VISIBLE_DEVICES")
        names = range(max(places) + 1) if visible is None else visible.split(",")
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(str(names[place]) for place in places)
        # FlashInfer compiles at the first start, for minutes and with nvcc, and dense models in 16 bits gain nothing.
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if dtype in ("float32", "float"):
            # Triton's attention, the only one for float32, would multiply in TF32.
            defaults["TRITON_F32_DEFAULT"] = "ieee"
    else:
        num_cores = len(os.sched_getaffinity(0)) * of_engine // topology.local_world_size
        if devices is not None:
            num_cores = len(devices)
            kept[CORES_VARIABLE] = ",".join(map(str, devices))
        defaults["OMP_NUM_THREADS"] = str(max(1, num_cores // num_workers))
    library = str(Path(__file__).parents[2])
    path = os.pathsep.join([library, kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else [library])
    forced = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Workers must import the sampler's main module first (see `start_worker`).
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Killed workers leave their queues.
        **without_tracker_warnings(kept),
        "PYTHONPATH": path,
        "TMPDIR": scratch,
    }
    return {**defaults, **kept, **forced}


def vllm_variables(environment: Mapping[str, str], on_cpu: bool) -> dict[str, str]:
    """Return what vLLM starts with in sampler and server alike, unless the user has set something else."""
    of_cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"} if on_cpu else {}
    return {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        **on_loopback(),
        **bounded_spin(environment),
        **of_cpu,
    }
