"""A rank of a small run on two nodes; test_nodes.py starts one torchrun per node.

node_script.py WHAT

The environment variable NODE is the test's number of this node, because torchrun numbers the nodes in any order.
"""

import json
import os
import signal
import sys
import time

import vectorlm
from vectorlm.errors import VectorLMError
from vectorlm.ranks.collectives import Collectives


def work(what):
    import torch
    import torch.distributed as dist

    topology, node = vectorlm.Topology.from_environment(), int(os.environ["NODE"])
    collectives = Collectives(topology, 20.0)
    notes = collectives.all_gather_object("the start", topology.rank)
    total = torch.tensor(topology.rank + 1)
    dist.all_reduce(total)
    print("working", flush=True)
    if node == 1 and what == "raise after the other node has returned":
        time.sleep(3.0)
        raise KeyError("late")
    if node == 1 and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("kill", "wait in a collective"):
        # This rank runs no Python code while it waits here.
        dist.barrier() if node == 0 else time.sleep(90)
    if what == "wait in the store":
        collectives.all_gather_object("sampling") if node == 0 else time.sleep(90)
    return {
        "rank": topology.rank,
        "local_rank": topology.local_rank,
        "num_nodes": topology.num_nodes,
        "notes": notes,
        "total": int(total),
    }


if __name__ == "__main__":
    try:
        print(json.dumps(vectorlm.launch(work, sys.argv[1])), flush=True)
    except VectorLMError as error:
        sys.exit(f"{type(error).__name__}: {error}")
