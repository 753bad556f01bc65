"""The default process group of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from vectorlm.ranks.placement import share_cores
from vectorlm.ranks.topology import Topology


@contextmanager
def process_group(topology: Topology, timeout_s: float = 1800.0) -> Iterator[None]:
    """Let the ranks talk for as long as the block runs; an existing process group is used and left alone.

    gloo carries CPU tensors and NCCL those on CUDA. Ranks on CPU share the cores of their node, unless the
    environment names a number of threads.

    Args:
        topology: This rank's place; the addresses come from torchrun's or the launcher's variables.
        timeout_s: Longest wait of one collective, in seconds.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    if topology.is_cuda:
        torch.cuda.set_device(topology.device)
    else:
        share_cores(topology)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if topology.is_cuda else "gloo",
        store=dist.HashStore() if topology.world_size == 1 else None,
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device(topology.device) if topology.is_cuda else None,
    )
    yield
    # Not after an error: taking a group down waits for peers that may be gone.
    dist.destroy_process_group()
