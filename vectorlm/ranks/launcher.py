"""Start a function on every rank, and report the first real error of any of them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from vectorlm.errors import LaunchError, RankFailed
from vectorlm.ranks.assembly import Assembly, assemble
from vectorlm.ranks.farewell import leave_together
from vectorlm.ranks.fault import read_faults, write_fault
from vectorlm.ranks.group import process_group
from vectorlm.ranks.neighbours import Neighbours
from vectorlm.ranks.node import Node, join_address
from vectorlm.ranks.topology import Topology, is_rank
from vectorlm.ranks.watchdog import OVER, follow_parent

AGENT_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"

AGENT_TIMEOUT_S = 60

LINGER_S = 1.0
"""A rank that raised stays this long: a peer that was killed is then what the supervisor sees first."""


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
            return _run(payload, node, _ALONE, timeout_s, scratch)
        assembly = assemble(node, start_timeout_s)
        with Neighbours(node, assembly, Path(scratch, OVER).touch) as neighbours:
            return _run(payload, node, _joint(node, assembly), timeout_s, scratch, neighbours)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


_ALONE = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}


def _joint(node: Node, assembly: Assembly) -> dict[str, Any]:
    """Return how torch's agents find each other; the nodes have met already, so its own wait is short."""
    return {
        "run_id": assembly.run_id,
        "rdzv_backend": "static",
        "rdzv_endpoint": join_address(node.host, assembly.store_port),
        "rdzv_configs": {"rank": node.rank, "timeout": AGENT_TIMEOUT_S},
    }


def _run(
    payload: bytes,
    node: Node,
    rendezvous: dict[str, Any],
    timeout_s: float,
    scratch: str,
    neighbours: Neighbours | None = None,
) -> list[Any]:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=node.num_nodes,
        max_nodes=node.num_nodes,
        nproc_per_node=node.num_ranks,
        max_restarts=0,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=scratch),
        shutdown_timeout=3,
        **{"run_id": uuid.uuid4().hex, **rendezvous},
    )
    try:
        with _quiet_agent(), _own_signals():
            results = elastic_launch(config, _rank_main)(payload, os.getpid(), scratch, timeout_s)
    except ChildFailedError as error:
        failure = _first_failure(error, scratch, node.world_size)
        raise RankFailed(neighbours.first_cause(failure) if neighbours else failure) from None
    except SignalException as error:
        if neighbours is not None:
            neighbours.tell(f"node {node.rank} of {node.num_nodes} was ended by {error.sigval.name}.")
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise RankFailed(
            f"the run was ended by {error.sigval.name}; all {node.world_size} ranks are gone."
        ) from None
    except DistError as error:
        failure = f"the ranks of node {node.rank} of {node.num_nodes} could not be started: {error}"
        raise LaunchError(neighbours.first_cause(failure) if neighbours else failure) from error
    return [cloudpickle.loads(results[rank]) for rank in sorted(results)]


def _rank_main(payload: bytes, supervisor_pid: int, scratch: str, timeout_s: float) -> bytes:
    """Run one rank: set the process up, call the function, leave a note when it raises."""
    follow_parent(supervisor_pid, scratch)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tempfile.tempdir = scratch
    topology = Topology.from_environment()
    try:
        fn, args = cloudpickle.loads(payload)
        with process_group(topology, timeout_s):
            result = cloudpickle.dumps(fn(*args))
            leave_together(topology)
            return result
    except BaseException as error:
        if topology.error_file is not None:
            write_fault(topology.error_file, topology.rank, error)
        time.sleep(LINGER_S if topology.world_size > 1 else 0.0)
        raise SystemExit(1) from error


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


def _first_failure(error: Any, scratch: str, world_size: int) -> str:
    """Tell a rank that was killed from one that raised, and name the one that failed first."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return f"rank {rank} of {world_size} was ended by {name} (exit code {failure.exitcode})."
    faults = read_faults(scratch)
    if not faults:
        return f"rank {rank} of {world_size} ended with exit code {failure.exitcode} and no error."
    first = faults[0]
    return f"rank {first.rank} of {world_size} raised {first.message}\n\n{first.traceback}"


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Put back what the agent changes and leaves: signal handlers, of which Ctrl-C's matters in a notebook."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    variable = os.environ.get(AGENT_VARIABLE)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if variable is None:
            os.environ.pop(AGENT_VARIABLE, None)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence the agent's own account of a failure: `launch` reports the cause once, in its own words."""
    noisy = ("torch.distributed.elastic", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(noisy)]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
