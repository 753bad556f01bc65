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
from typing import Any

import cloudpickle

from vectorlm.errors import LaunchError, RankFailed
from vectorlm.ranks.fault import read_faults, write_fault
from vectorlm.ranks.group import process_group
from vectorlm.ranks.topology import Topology
from vectorlm.ranks.watchdog import follow_parent

AGENT_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"

LINGER_S = 1.0
"""A rank that raised stays this long: a peer that was killed is then what the supervisor sees first."""


def launch(fn: Callable[..., Any], *args: Any, world_size: int = 1, timeout_s: float = 1800.0) -> list[Any]:
    """Call ``fn(*args)`` on `world_size` new ranks of this machine and wait for them.

    Every rank is a process of its own under torch's elastic agent, with the default process group initialised
    (gloo on CPU; NCCL for tensors on CUDA). `fn` may live in ``__main__`` or in a notebook cell.

    Args:
        fn: What each rank runs; its result must pickle.
        *args: Its arguments, the same on every rank.
        world_size: Number of ranks, at least 1; on a CUDA machine one per device.
        timeout_s: Longest wait of one collective, in seconds.

    Returns:
        The results of `fn`, by rank.

    Raises:
        LaunchError: The ranks could not be started.
        RankFailed: A rank raised or died; the text holds its own error and traceback. All ranks are gone by then.
        KeyboardInterrupt: Ctrl-C arrived; all ranks are gone by then.
    """
    if world_size < 1:
        raise LaunchError(f"world_size={world_size} cannot run: it must be at least 1.")
    scratch = tempfile.mkdtemp(prefix="vectorlm-")
    try:
        return _run(cloudpickle.dumps((fn, args)), world_size, timeout_s, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(payload: bytes, world_size: int, timeout_s: float, scratch: str) -> list[Any]:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=scratch),
        shutdown_timeout=3,
    )
    try:
        with _quiet_agent(), _own_signals():
            results = elastic_launch(config, _rank_main)(payload, os.getpid(), scratch, timeout_s)
    except ChildFailedError as error:
        raise _first_failure(error, scratch, world_size) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise RankFailed(
            f"the run was ended by {error.sigval.name}; all {world_size} ranks are gone."
        ) from None
    return [cloudpickle.loads(results[rank]) for rank in range(world_size)]


def _rank_main(payload: bytes, supervisor_pid: int, scratch: str, timeout_s: float) -> bytes:
    """Run one rank: set the process up, call the function, leave a note when it raises."""
    follow_parent(supervisor_pid, scratch)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tempfile.tempdir = scratch
    topology = Topology.from_environment()
    try:
        fn, args = cloudpickle.loads(payload)
        with process_group(topology, timeout_s):
            return cloudpickle.dumps(fn(*args))
    except BaseException as error:
        if topology.error_file is not None:
            write_fault(topology.error_file, topology.rank, error)
        time.sleep(LINGER_S if topology.world_size > 1 else 0.0)
        raise SystemExit(1) from error


def _first_failure(error: Any, scratch: str, world_size: int) -> RankFailed:
    """Tell a rank that was killed from one that raised, and name the one that failed first."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return RankFailed(f"rank {rank} of {world_size} was ended by {name} (exit code {failure.exitcode}).")
    faults = read_faults(scratch)
    if not faults:
        return RankFailed(
            f"rank {rank} of {world_size} ended with exit code {failure.exitcode} and no error."
        )
    first = faults[0]
    return RankFailed(f"rank {first.rank} of {world_size} raised {first.message}\n\n{first.traceback}")


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
