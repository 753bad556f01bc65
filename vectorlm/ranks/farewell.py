"""The end of a run on several nodes, which all ranks reach together."""

from __future__ import annotations

import time

from vectorlm.ranks.topology import Topology

POLL_S = 0.1
KEY = "vectorlm/finished"


def leave_together(topology: Topology) -> None:
    """Wait, without a deadline, until every rank is here; returns at once in a run on one node.

    torch's agent, once its own ranks are gone, waits five minutes for the other nodes and hears of no failure
    meanwhile. A rank that waits is ended by its launcher as soon as another node fails.

    Args:
        topology: This rank's place; a process group that the caller took down is not waited for.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if topology.num_nodes == 1 or not dist.is_initialized():
        return
    store = _get_default_store()
    store.add(KEY, 1)
    while store.add(KEY, 0) < topology.world_size:
        time.sleep(POLL_S)
