"""Start a function on every rank, and report the first real error of any of them."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from vectorlm.errors import LaunchError
from vectorlm.ranks.agent import run_ranks
from vectorlm.ranks.assembly import Assembly, assemble
from vectorlm.ranks.fault import write_fault
from vectorlm.ranks.group import process_group
from vectorlm.ranks.neighbours import Neighbours
from vectorlm.ranks.node import Node, join_address
from vectorlm.ranks.topology import Topology, is_rank
from vectorlm.ranks.watchdog import OVER, follow_parent

AGENT_TIMEOUT_S = 60


def launch(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 1,
    nnodes: int = 1,
    node_rank: int = 0,
    rdzv_endpoint: str | None = None,
    timeout_s: float = 1800.0,
    start_timeout_s: float = 600.0,
) -> list[Any]:
    """Call ``fn(*args)`` on new ranks of this machine, and of others that make the same call; wait for all of them.

    Every rank is a process of its own under torch's elastic agent, with the default process group initialised
    (gloo on CPU; NCCL for tensors on CUDA). `fn` may live in ``__main__`` or in a notebook cell. In a process that
    torchrun made a rank, `fn` is called right here, so one script serves both.

    Args:
        fn: What each rank runs; its result must pickle.
        *args: Its arguments, the same on every rank.
        world_size: Number of ranks on all nodes together, at least 1; on CUDA machines one per device.
        nnodes: Number of machines; each runs this call and ``world_size / nnodes`` of the ranks.
        node_rank: Index of this machine, from 0.
        rdzv_endpoint: Machine 0 and a free port of it, as ``host:port``; needed from two machines on.
        timeout_s: Longest wait of one collective, in seconds.
        start_timeout_s: Longest wait for the other machines, in seconds.

    Returns:
        The results of `fn` on this machine's ranks, in their order; under torchrun that of this rank alone.

    Raises:
        LaunchError: The ranks could not be started, or a machine did not come.
        RankFailed: A rank of any machine raised or died, or a machine was lost; the text holds the rank's own error
            and traceback and is the same on every machine. All ranks are gone by then.
        KeyboardInterrupt: Ctrl-C arrived; all ranks are gone by then.
    """
    node = Node.of(world_size, nnodes, node_rank, rdzv_endpoint)
    if is_rank():
        return [_call_here(fn, args, node, timeout_s)]
    scratch = tempfile.mkdtemp(prefix="vectorlm-")
    try:
        payload = cloudpickle.dumps((fn, args))
        if node.num_nodes == 1:
            return run_ranks(payload, node, _alone(), timeout_s, scratch, lambda cause: cause)
        assembly = assemble(node, start_timeout_s)
        with Neighbours(node, assembly, Path(scratch, OVER).touch) as neighbours:
            found = _joint(node, assembly)
            return run_ranks(payload, node, found, timeout_s, scratch, neighbours.first_cause)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _alone() -> dict[str, Any]:
    """Return how the only agent of a run finds itself: at a port of its own, so that runs do not meet."""
    endpoint = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    return {"run_id": uuid.uuid4().hex, **endpoint}


def _joint(node: Node, assembly: Assembly) -> dict[str, Any]:
    """Return how torch's agents find each other; the nodes have met already, so its own wait is short."""
    return {
        "run_id": assembly.run_id,
        "rdzv_backend": "static",
        "rdzv_endpoint": join_address(node.host, assembly.store_port),
        "rdzv_configs": {"rank": node.rank, "timeout": AGENT_TIMEOUT_S},
    }


def _call_here(fn: Callable[..., Any], args: tuple[Any, ...], node: Node, timeout_s: float) -> Any:
    """Call the function as the rank that another launcher made this process."""
    topology = Topology.from_environment()
    for name, asked, given in (
        ("world_size", node.world_size, topology.world_size),
        ("nnodes", node.num_nodes, topology.num_nodes),
    ):
        if asked not in (1, given):
            raise LaunchError(
                f"{name}={asked} differs from the {given} that torchrun started: leave it out, or start as many."
            )
    try:
        if topology.error_file is not None:
            follow_parent(os.getppid())
        with process_group(topology, timeout_s):
            return fn(*args)
    except Exception as error:
        if topology.error_file is not None:
            write_fault(topology.error_file, topology.rank, error)
        raise
