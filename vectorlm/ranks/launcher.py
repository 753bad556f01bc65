"""Run a function on every rank of this machine, and report the first real error of any of them."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle

from vectorlm.errors import LaunchError, RankFailed
from vectorlm.ranks.placement import bounded_spin, share_cores
from vectorlm.ranks.process_end import (
    absent_ranks,
    first_fault,
    follow_parent,
    remove_folder,
    without_tracker_warnings,
    write_fault,
    write_stack_at_end,
)
from vectorlm.ranks.topology import Topology, device_of, is_rank, with_rank_variables
from vectorlm.ranks.wait import report_wait

AGENT_VARIABLES = {
    "TORCHELASTIC_SIGNALS_TO_HANDLE": None,
    # Else the agent opens a store of its own, to all networks.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
"""Variables that the agent reads or leaves behind, with their values while it runs."""
LOOPBACK = "127.0.0.1"
AGENT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
TIMED_OUT = re.compile("(?i)(?<!engine)timed? ?out")
"""How gloo, NCCL, torch's store and `HandoffTimeout` say that a rank waited for others in vain."""
LINGER_S = 1.0
"""A rank that raised stays this long: a peer that was killed is then what the agent sees first."""
WORKERS_REST_S = 0.1
"""gloo's threads let go of the tensors of the last collective after it has returned, for which they need the
interpreter; one that asks for it while the interpreter ends aborts the process."""
SCRATCH_VARIABLE, UNGUARDED = "VECTORLM_SCRATCH", "unguarded"
"""Where a rank that runs the whole script again leaves a file of this name."""
GUARD_RULE = """the script calls launch() while it is imported, and every rank imports it. Put the call, and whatever \
else must run once, under `if __name__ == "__main__":`."""
NODE_ARGUMENTS = ("nnodes", "node_rank", "rdzv_endpoint", "start_timeout_s")


def launch(
    fn: Callable[..., Any], *args: Any, world_size: int = 1, timeout_s: float = 1800.0, **unknown: Any
) -> list[Any]:
    """Call ``fn(*args)`` on new ranks of this machine, and wait for all of them.

    Every rank is a process of its own under torch's elastic agent, with the default process group initialised
    (gloo on CPU; NCCL for tensors on CUDA). `fn` may live in ``__main__`` or in a notebook cell. In a process that
    torchrun, accelerate or srun made a rank, `fn` is called right here, so one script serves one machine and several.

    Args:
        fn: What each rank runs; its result must pickle.
        *args: Its arguments, the same on every rank.
        world_size: Number of ranks, at least 1; on CUDA machines one per device. Under torchrun leave it out.
        timeout_s: Longest wait of one collective, in seconds.
        **unknown: Only for a clear error; the arguments of several machines are torchrun's.

    Returns:
        The results of `fn`, by rank; under torchrun the result of this rank alone.

    Raises:
        LaunchError: The ranks could not be started, there are fewer devices than ranks, torchrun started another number
            of them, or the script calls this outside ``if __name__ == "__main__":``, so that a rank would call it too.
        RankFailed: A rank raised or died; the text holds the rank's own error and traceback. All ranks are gone by
            then.
        KeyboardInterrupt: Ctrl-C arrived; all ranks are gone by then.
    """
    if unknown:
        _refuse(list(unknown))
    if world_size < 1:
        raise LaunchError(f"world_size={world_size} cannot run: it must be at least 1.")
    _refuse_inside_an_import()
    if is_rank():
        return [_call_here(fn, args, world_size, timeout_s)]
    device_of(world_size - 1)
    scratch = tempfile.mkdtemp(prefix="vectorlm-")
    try:
        return _run_ranks(cloudpickle.dumps((fn, args)), world_size, timeout_s, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _refuse(unknown: list[str]) -> None:
    if unknown[0] not in NODE_ARGUMENTS:
        raise TypeError(f"launch() got an unexpected keyword argument {unknown[0]!r}")
    raise LaunchError(
        f"launch() starts the ranks of one machine and takes no {unknown[0]}. Start several machines with torchrun: "
        "torchrun --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint HOST:29400 your_script.py "
        "(docs/multi_node.md)."
    )


def _refuse_inside_an_import() -> None:
    """Stop where a new process, which runs the script again to know its functions, comes to `launch`."""
    # As multiprocessing asks; its own error would come from every rank, with a traceback of 40 lines.
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    if scratch := os.environ.get(SCRATCH_VARIABLE):
        Path(scratch, UNGUARDED).touch()
        os._exit(1)
    raise LaunchError(GUARD_RULE)


def _call_here(fn: Callable[..., Any], args: tuple[Any, ...], world_size: int, timeout_s: float) -> Any:
    """Call the function as the rank that torchrun or srun made this process."""
    # For torch, and for what this rank starts.
    os.environ.update(with_rank_variables(os.environ))
    topology = Topology.from_environment()
    try:
        starter = "torchrun" if topology.error_file or "SLURM_STEP_ID" not in os.environ else "srun"
        if world_size not in (1, topology.world_size):
            raise LaunchError(
                f"world_size={world_size} differs from the {topology.world_size} ranks that {starter} started "
                f"({topology.num_nodes} x {topology.local_world_size}). Leave world_size out, or start another number "
                "of them."
            )
        if topology.error_file is not None:
            follow_parent(os.getppid())
        with process_group(topology, timeout_s):
            return fn(*args)
    except Exception as error:
        if topology.error_file is not None:
            write_fault(topology.error_file, topology.rank, error)
        raise


def _run_ranks(payload: bytes, world_size: int, timeout_s: float, scratch: str) -> list[Any]:
    """Run the pickled function on each rank, under torch's agent; `scratch` takes temporary files and errors."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        max_restarts=0,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=scratch),
        shutdown_timeout=3,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        # A file: torch's rendezvous would open a port to all networks.
        rdzv_endpoint=os.path.join(scratch, "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr=LOOPBACK,
    )
    # A lone rank needs no store that others reach.
    store = _open_store() if world_size > 1 else None
    port = None if store is None else store.port
    try:
        with _agent_side_effects_undone(scratch), _agent_patched():
            results = elastic_launch(config, _rank_main)(payload, os.getpid(), scratch, timeout_s, port)
    except ChildFailedError as error:
        if Path(scratch, UNGUARDED).exists():
            raise LaunchError(GUARD_RULE) from None
        raise RankFailed(_first_failure(error, scratch, world_size)) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise RankFailed(
            f"the run was ended by {error.sigval.name}; all {world_size} ranks are gone."
        ) from None
    except DistError as error:
        raise LaunchError(f"the {world_size} ranks could not be started: {error}") from error
    return [cloudpickle.loads(results[rank]) for rank in sorted(results)]


@contextlib.contextmanager
def _agent_patched() -> Iterator[None]:
    """Let torch's agent notice a rank that ends with exit code 0 before it has returned: it would wait for ever.

    And keep Ctrl-C from a rank until it knows what to do then: it would print a traceback out of an import.
    """
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    poll, start = MultiprocessContext._poll, MultiprocessContext._start

    def poll_and_notice(self: Any) -> Any:
        result = poll(self)
        for rank, process in enumerate(self._pc.processes if result is None else ()):
            if process.exitcode == 0 and rank not in self._return_values and self._ret_vals[rank].empty():
                raise RankFailed(f"rank {rank} of {self.nprocs} ended with exit code 0 and no error.")
        return result

    def start_uninterrupted(self: Any) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            start(self)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    context: Any = MultiprocessContext
    context._poll, context._start = poll_and_notice, start_uninterrupted
    try:
        yield
    finally:
        context._poll, context._start = poll, start


def _open_store() -> Any:
    """Open the key-value store of the ranks, on a free port of the loopback interface alone."""
    from torch.distributed import TCPStore

    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _rank_main(
    payload: bytes, parent_pid: int, scratch: str, timeout_s: float, store_port: int | None
) -> bytes:
    """Run one rank: set the process up, call the function, write an error file when it raises."""
    follow_parent(parent_pid, scratch)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    tempfile.tempdir = scratch
    topology = Topology.from_environment()
    write_stack_at_end(scratch, topology.rank)
    result = None
    try:
        fn, args = cloudpickle.loads(payload)
        with process_group(topology, timeout_s, store_port):
            result = cloudpickle.dumps(fn(*args))
    except BaseException as error:
        if topology.error_file is not None:
            write_fault(topology.error_file, topology.rank, error)
        time.sleep(LINGER_S if topology.world_size > 1 else 0.0)
    if os.getppid() != parent_pid:
        # The thread that follows the launcher may not have seen yet that it was killed.
        remove_folder(Path(scratch))
    if result is None:
        sys.stdout.flush()
        sys.stderr.flush()
        # The interpreter's own end takes 2 s with vLLM in it, and on CUDA it may wait for ranks that are gone.
        os._exit(1)
    return result


def _first_failure(error: Any, scratch: str, world_size: int) -> str:
    """Tell a rank that was killed from one that raised, and name the one that failed first."""
    rank, failure = error.get_first_failure()
    first = first_fault(scratch)
    # gloo aborts a rank whose peer is gone: then the peer's error is the cause.
    if failure.exitcode < 0 and not (first and failure.exitcode == -signal.SIGABRT):
        name = signal.Signals(-failure.exitcode).name
        return f"rank {rank} of {world_size} was ended by {name} (exit code {failure.exitcode})."
    if first is None:
        return f"rank {rank} of {world_size} ended with exit code {failure.exitcode} and no error."
    rank, message, trace = first
    absent = absent_ranks(scratch, world_size) if TIMED_OUT.search(message) else ""
    return f"rank {rank} of {world_size} raised {message}\n{absent}\n{trace}"


@contextlib.contextmanager
def _agent_side_effects_undone(scratch: str) -> Iterator[None]:
    """Silence the agent, because `launch` reports the cause, and put back the signal handlers that it leaves.

    The files in which torch's processes leave errors go to `scratch`, which is removed even after a kill.
    """
    noisy = ("torch.distributed.elastic", "torch.multiprocessing")
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(noisy)]
    levels = [logger.level for logger in loggers]
    # Only the main thread may set handlers. In a notebook Ctrl-C needs its own.
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in AGENT_SIGNALS} if is_main else {}
    variables = {
        **AGENT_VARIABLES,
        **bounded_spin(os.environ),
        # An ended rank leaves locks: tqdm's, for example.
        **without_tracker_warnings(os.environ),
        SCRATCH_VARIABLE: scratch,
    }
    before = {name: os.environ.get(name) for name in variables}
    tempdir, tempfile.tempdir = tempfile.tempdir, scratch
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        tempfile.tempdir = tempdir
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def process_group(
    topology: Topology, timeout_s: float = 1800.0, store_port: int | None = None
) -> Iterator[None]:
    """Initialise the default process group for the block; a group that exists already is used and left alone.

    gloo carries CPU tensors and NCCL those on CUDA. `timeout_s` is the longest wait of one collective. Ranks on CPU
    share the cores of their node, unless the environment names a number of threads. On one machine gloo listens on the
    loopback interface alone, unless GLOO_SOCKET_IFNAME names another; `store_port` is `launch`'s store, and where it is
    left out torchrun's is used.
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
    if topology.num_nodes == 1 and "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store: Any = None
    if topology.world_size == 1:
        store = dist.HashStore()
    elif store_port is not None:
        store = dist.TCPStore(LOOPBACK, store_port, is_master=False, timeout=timedelta(seconds=timeout_s))
    # On the first rank of each node: it may wait for a machine for ever.
    speaks = topology.local_rank == 0 and topology.world_size > 1
    place = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
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
    yield
    # Only after success: after an error these calls would wait for peers that may be gone.
    if dist.is_initialized():
        if topology.num_nodes > 1:
            # Leave together: a torchrun agent whose ranks have returned waits 300 s for the other nodes, hears of no
            # failure there, and then reports success.
            dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()
        time.sleep(WORKERS_REST_S if topology.world_size > 1 else 0.0)
