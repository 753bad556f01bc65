"""The process group that the ranks of a run share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from vectorlm.ranks.placement import on_loopback, share_cores
from vectorlm.ranks.topology import Topology
from vectorlm.ranks.wait import report_wait

WORKERS_REST_S = 0.1
"""gloo's threads let go of the tensors of the last collective after it has returned, for which they need the
interpreter; one that asks for it while the interpreter ends aborts the process."""


@contextmanager
def process_group(
    topology: Topology, timeout_s: float = 1800.0, scratch: str | None = None
) -> Iterator[None]:
    """Initialise the default process group for the block; a group that exists already is used and left alone.

    gloo carries CPU tensors and NCCL those on CUDA. `timeout_s` is the longest wait of one collective. Ranks on CPU
    share the cores of their node, unless the environment names a number of threads. On one machine gloo listens on the
    loopback interface alone, unless GLOO_SOCKET_IFNAME names another. The ranks meet in the folder `scratch`, and over
    torchrun's store where it is left out: what is written to a store leads gloo to its peers, whose pickles it loads,
    so no stranger may write there.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    if topology.is_cuda:
        torch.cuda.set_device(topology.device)
        # It takes 0.1 to 0.4 s to plan each new shape (sglang 4650), and packed rows have new shapes in every pass.
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        share_cores(topology)
    if topology.num_nodes == 1:
        os.environ.update({**on_loopback(), **os.environ})
    store: Any = None
    if topology.world_size == 1:
        store = dist.HashStore()
    elif scratch is not None:
        store = dist.FileStore(f"{scratch}/store", topology.world_size)
        store.set_timeout(timedelta(seconds=timeout_s))
    # On the first rank of each node: it may wait for a machine for ever.
    speaks = topology.local_rank == 0 and topology.world_size > 1
    place = scratch or ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    what = f"rank {topology.rank} is waiting for the other ranks of {topology.world_size}, at {place}"
    with report_wait(what, is_on=speaks):
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if topology.is_cuda else "gloo",
            store=store,
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=torch.device(topology.device) if topology.is_cuda else None,
        )
    try:
        yield
    except BaseException:
        # What follows would wait for peers that may be gone; a lone rank has none, and its process may go on.
        if topology.world_size == 1 and dist.is_initialized():
            dist.destroy_process_group()
        raise
    if dist.is_initialized():
        if topology.num_nodes > 1:
            # Leave together: a torchrun agent whose ranks have returned waits 300 s for the other nodes, hears of no
            # failure there, and then reports success.
            dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()
        time.sleep(WORKERS_REST_S if topology.world_size > 1 else 0.0)
