"""torch's elastic agent, which starts this node's ranks and ends them all when one fails."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle

from vectorlm.errors import LaunchError, RankFailed
from vectorlm.ranks.farewell import leave_together
from vectorlm.ranks.fault import read_faults, write_fault
from vectorlm.ranks.group import process_group
from vectorlm.ranks.node import Node
from vectorlm.ranks.topology import Topology
from vectorlm.ranks.watchdog import follow_parent

AGENT_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"

LINGER_S = 1.0
"""A rank that raised stays this long: a peer that was killed is then what the supervisor sees first."""


def run_ranks(
    payload: bytes,
    node: Node,
    rendezvous: Mapping[str, Any],
    timeout_s: float,
    scratch: str,
    explain: Callable[[str], str],
) -> list[Any]:
    """Run the function in `payload` on each rank of this node.

    Args:
        payload: The function and its arguments, as cloudpickle wrote them.
        node: This machine's place.
        rendezvous: Arguments of torch's ``LaunchConfig`` that say how the agents of all nodes find each other.
        timeout_s: Longest wait of one collective, in seconds.
        scratch: The ranks' folder for temporary files and for the notes of those that fail.
        explain: Takes what went wrong on this node and returns the cause to report.

    Returns:
        The results of this node's ranks, in their order.

    Raises:
        LaunchError, RankFailed, KeyboardInterrupt: As `vectorlm.launch`.
    """
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
        **rendezvous,
    )
    try:
        with _quiet_agent(), _own_signals():
            results = elastic_launch(config, _rank_main)(payload, os.getpid(), scratch, timeout_s)
    except ChildFailedError as error:
        raise RankFailed(explain(_first_failure(error, scratch, node.world_size))) from None
    except SignalException as error:
        explain(f"node {node.rank} of {node.num_nodes} was ended by {error.sigval.name}.")
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise RankFailed(
            f"the run was ended by {error.sigval.name}; all {node.world_size} ranks are gone."
        ) from None
    except DistError as error:
        problem = f"the ranks of node {node.rank} of {node.num_nodes} could not be started: {error}"
        raise LaunchError(explain(problem)) from error
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
