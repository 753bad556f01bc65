"""One node of a small run; started by test_nodes.py once per node, as a user starts a script on each machine.

node_script.py WHAT WORLD_SIZE NNODES NODE_RANK ENDPOINT START_TIMEOUT_S
"""

import json
import os
import signal
import sys
import time

import vectorlm
from vectorlm.errors import VectorLMError
from vectorlm.ranks.meeting import Meeting


def work(what):
    import torch
    import torch.distributed as dist

    topology = vectorlm.Topology.from_environment()
    meeting = Meeting(topology, 60.0)
    notes = meeting.gather("the start", topology.rank)
    total = torch.tensor(topology.rank + 1)
    dist.all_reduce(total)
    if topology.local_rank == 0:
        print(f"working on node {topology.node}", flush=True)
    victim = int(what.split()[-1]) if what[-1].isdigit() else None
    if topology.rank == victim and what.startswith("raise on"):
        raise KeyError("lost")
    if topology.rank == victim and what.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what.startswith("raise late on"):
        # The other rank has returned by then.
        time.sleep(3.0 if topology.rank == victim else 0.0)
        if topology.rank == victim:
            raise KeyError("late")
    elif what != "exchange":
        # In a collective, where no Python code of this rank runs.
        dist.barrier()
        if what == "wait":
            time.sleep(90)
    return {
        "rank": topology.rank,
        "node": topology.node,
        "local_rank": topology.local_rank,
        "num_nodes": topology.num_nodes,
        "notes": notes,
        "total": int(total),
    }


if __name__ == "__main__":
    what, world_size, nnodes, node_rank, endpoint, start_timeout_s = sys.argv[1:]
    arguments = {
        "world_size": int(world_size),
        "nnodes": int(nnodes),
        "node_rank": int(node_rank),
        "rdzv_endpoint": endpoint,
        "start_timeout_s": float(start_timeout_s),
    }
    try:
        for _ in range(2 if what == "exchange" else 1):
            print(json.dumps(vectorlm.launch(work, what, **arguments)), flush=True)
    except VectorLMError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
