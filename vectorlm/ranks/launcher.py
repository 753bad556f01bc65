"""Run a function on every rank of this machine, and report the first real error."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from vectorlm.errors import LaunchError, RankFailed
from vectorlm.ranks.process_end import (
    absent_ranks,
    end_with_threads_without_memory,
    first_fault,
    follow_parent,
    how_it_ended,
    remove_folder,
    without_tracker_warnings,
    write_fault,
    write_stack_at_end,
)
from vectorlm.ranks.topology import (
    LOOPBACK,
    Topology,
    bounded_spin,
    device_of,
    is_rank,
    keeping_freed_memory,
    on_loopback,
    share_cores,
    with_rank_variables,
    without_gc,
)
from vectorlm.ranks.wait import escape_what_the_console_cannot_show, report_wait

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that end the run. SIGUSR1 is SLURM's early warning, which by default ends a process without a message."""
TIMED_OUT = re.compile("(?i)(?<!engine)timed? ?out")
"""A pattern for the time-out errors of gloo, NCCL, torch's store and `HandoffTimeout`."""
LOOK_S = 0.1
"""Polling interval of the launcher, in seconds. It polls because a dead rank's child may keep the rank's pipes open."""
SHUTDOWN_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""
LINGER_S = 1.0
"""Seconds between a rank's error and its exit: the launcher then sees a killed peer first."""
SCRATCH_VARIABLE = "VECTORLM_SCRATCH"
UNGUARDED = "unguarded"
"""The file that a rank writes to the scratch folder if it runs the whole script again."""
GUARD_RULE = """the script starts ranks (launch(), reinforce() or finetune()) while it is imported, and every rank \
imports it. Put the call, and whatever else must run once, under `if __name__ == "__main__":`."""


def launch(fn: Callable[..., Any], *args: Any, world_size: int = 1, timeout_s: float = 1800.0) -> list[Any]:
    """Call ``fn(*args)`` on new ranks of this machine, and wait for all of them.

    Every rank is a new process with the default process group initialised (gloo on CPU; NCCL for tensors on CUDA).
    `fn` may live in ``__main__`` or in a notebook cell. In a process that torchrun, accelerate or srun made a rank,
    `fn` runs in that process. One script therefore works on one machine and on several.

    Args:
        fn: The function that each rank runs; its result must pickle.
        *args: Its arguments, the same on every rank.
        world_size: Number of ranks, at least 1; on CUDA machines one per device. Under torchrun leave it out.
        timeout_s: Longest wait of one collective, in seconds.

    Returns:
        The results of `fn`, by rank; under torchrun the result of this rank alone.

    Raises:
        LaunchError: The ranks could not be started, there are fewer devices than ranks, or torchrun started another
            number of ranks. Or the call is not under ``if __name__ == "__main__":``, and every rank would repeat it.
        RankFailed: A rank raised or died; the text holds the rank's own error and traceback. All ranks have ended.
        KeyboardInterrupt: Ctrl-C arrived; all ranks have ended.
    """
    if world_size < 1:
        raise LaunchError(f"world_size={world_size} cannot run: it must be at least 1.")
    # multiprocessing makes the same check, but its error comes from every rank, with a traceback of 40 lines.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        if scratch := os.environ.get(SCRATCH_VARIABLE):
            Path(scratch, UNGUARDED).touch()
            os._exit(1)
        raise LaunchError(GUARD_RULE)
    if is_rank():
        return [_call_here(fn, args, world_size, timeout_s)]
    device_of(world_size - 1)
    scratch = tempfile.mkdtemp(prefix="vectorlm-")
    try:
        return _run_ranks(cloudpickle.dumps((fn, args)), world_size, timeout_s, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _call_here(fn: Callable[..., Any], args: tuple[Any, ...], world_size: int, timeout_s: float) -> Any:
    """Call the function in this process, which torchrun or srun started as a rank."""
    # torch and the processes that this rank starts read these variables.
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
            end_with_threads_without_memory(topology.error_file, topology.rank)
        with process_group(topology, timeout_s):
            return _call_without_forks(fn, args)
    except Exception as error:
        if topology.error_file is not None:
            write_fault(topology.error_file, topology.rank, error)
        if topology.is_cuda:
            atexit.register(_end_now)
        raise


def _end_now() -> None:
    """End this process as `_rank_main` does."""
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's own end takes 2 s with vLLM in it, and on CUDA it may wait for ranks that are gone.
    os._exit(1)


def _call_without_forks(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call the function, and end a fork that returns from it: result, errors and group belong to the parent."""
    pid = os.getpid()
    escape_what_the_console_cannot_show()
    try:
        return fn(*args)
    finally:
        if os.getpid() != pid:
            error = sys.exception()
            if error is not None and not isinstance(error, SystemExit):
                traceback.print_exception(error)
            os._exit(int(getattr(error, "code", error) not in (None, 0)))


def _run_ranks(payload: bytes, world_size: int, timeout_s: float, scratch: str) -> list[Any]:
    """Run the pickled function on new ranks; their temporary files and errors go to `scratch`."""
    context = multiprocessing.get_context("spawn")
    ranks: list[Any] = []
    readers: list[Connection] = []
    with _signals_end_the_run(world_size):
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                readers.append(reader)
                arguments = (payload, os.getpid(), scratch, timeout_s, writer)
                ranks.append(context.Process(target=_rank_main, args=arguments))
                with _environment(_variables_of_rank(rank, world_size, scratch)):
                    ranks[-1].start()
                writer.close()
            results, failed = _wait_for(ranks, readers)
        except OSError as error:
            if not Path(scratch, UNGUARDED).exists():
                raise LaunchError(f"the {world_size} ranks could not be started: {error}") from error
        finally:
            # Before the error is composed, because an ended rank writes its stack for it.
            _end(ranks)
    if Path(scratch, UNGUARDED).exists():
        raise LaunchError(GUARD_RULE)
    if failed:
        raise RankFailed(_first_failure(failed, scratch, world_size))
    return [cloudpickle.loads(results[rank]) for rank in range(world_size)]


def _wait_for(ranks: Sequence[Any], readers: Sequence[Connection]) -> tuple[dict[int, bytes], dict[int, int]]:
    """Wait until all ranks have returned and ended, or one has failed; return results, and exit codes of failures."""
    results: dict[int, bytes] = {}
    while True:
        running = [process.sentinel for process in ranks if process.exitcode is None]
        wait([*running, *(reader for rank, reader in enumerate(readers) if rank not in results)], LOOK_S)
        # Read before the results, because a rank sends its result before it ends.
        codes = [process.exitcode for process in ranks]
        for rank, reader in enumerate(readers):
            with contextlib.suppress(EOFError, OSError):
                if rank not in results and reader.poll():
                    results[rank] = reader.recv_bytes()
        failed = {
            rank: code
            for rank, code in enumerate(codes)
            if code is not None and (code != 0 or rank not in results)
        }
        if failed or None not in codes:
            # Ctrl-C reaches the ranks, too: this process then raises KeyboardInterrupt here.
            time.sleep(LOOK_S if -signal.SIGINT in failed.values() else 0.0)
            return results, failed


def _end(ranks: Sequence[Any]) -> None:
    """End the ranks that still run, with SIGKILL if they ignore SIGTERM."""
    started = [process for process in ranks if process.pid is not None]
    for process in started:
        process.terminate()
    deadline = time.monotonic() + SHUTDOWN_S
    while any(process.exitcode is None for process in started) and time.monotonic() < deadline:
        time.sleep(LOOK_S / 10)
    for process in started:
        process.kill()
        process.join()
        process.close()


@contextlib.contextmanager
def _signals_end_the_run(world_size: int) -> Iterator[None]:
    """Raise in the block at the first signal that ends a process; restore the caller's handlers afterwards."""

    def end(number: int, frame: Any) -> None:
        for handled in handlers:
            # The ranks are being ended.
            signal.signal(handled, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise RankFailed(
            f"the run was ended by {signal.Signals(number).name}; all {world_size} ranks are gone."
        )

    # Only the main thread may set handlers. What the caller ignores stays ignored.
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in END_SIGNALS if is_main}
    if handlers.get(signal.SIGUSR1, signal.SIG_DFL) != signal.SIG_DFL:
        del handlers[signal.SIGUSR1]  # The caller uses it for something else.
    handlers = {number: old for number, old in handlers.items() if old not in (signal.SIG_IGN, None)}
    for number in handlers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _variables_of_rank(rank: int, world_size: int, scratch: str) -> dict[str, str]:
    """Return the environment variables of a rank: torchrun's, and those that torch reads when it is loaded."""
    error_file = _error_file(scratch, rank)
    error_file.parent.mkdir()
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        # Unused: the ranks connect through the scratch folder.
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": "0",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        SCRATCH_VARIABLE: scratch,
        **bounded_spin(os.environ),
        # An ended rank does not release its locks, for example tqdm's.
        **without_tracker_warnings(os.environ),
    }


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for a process that starts in the block, with Ctrl-C blocked until the process unblocks it.

    Otherwise Ctrl-C during a rank's imports would print a traceback.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    # Python's resource tracker unblocks SIGINT when it starts, and otherwise the first process would start it. It
    # cleans up after killed ranks and keeps its first signal mask: a SIGHUP to the whole group must not end it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, signal.SIGINT})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _error_file(scratch: str, rank: int) -> Path:
    return Path(scratch, f"rank-{rank}", "error.json")


def _rank_main(payload: bytes, parent_pid: int, scratch: str, timeout_s: float, results: Connection) -> None:
    """Run one rank: set the process up, call the function, send its result; write an error file when it raises."""
    follow_parent(parent_pid, scratch)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    tempfile.tempdir = scratch
    topology = Topology.from_environment()
    write_stack_at_end(scratch, topology.rank)
    end_with_threads_without_memory(_error_file(scratch, topology.rank), topology.rank)
    has_failed = False
    try:
        with without_gc():
            fn, args = cloudpickle.loads(payload)
        with process_group(topology, timeout_s, scratch):
            result = _pickled(_call_without_forks(fn, args))
        results.send_bytes(result)
    except BaseException as error:
        # If the launcher was killed, another rank may have removed the folder.
        with contextlib.suppress(FileNotFoundError):
            write_fault(_error_file(scratch, topology.rank), topology.rank, error)
        time.sleep(LINGER_S if topology.world_size > 1 else 0.0)
        has_failed = True
    if os.getppid() != parent_pid:
        # The thread that watches the launcher may not have noticed yet that the launcher was killed.
        remove_folder(Path(scratch))
    if has_failed:
        _end_now()


def _pickled(result: Any) -> bytes:
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        rule = f"the function of launch must return a value that can be pickled ({type(error).__name__}: {error})."
        raise LaunchError(
            f"{rule} Return numbers or texts, and write a model with vectorlm.save_model."
        ) from error


def _first_failure(failed: Mapping[int, int], scratch: str, world_size: int) -> str:
    """Return the error of the rank that failed first; `failed` holds the exit codes of ended ranks."""
    first = first_fault(scratch)
    for rank, code in failed.items():
        # gloo aborts a rank whose peer is gone; then the cause is the peer's error.
        is_lost = first is not None and code == -signal.SIGABRT
        if not _error_file(scratch, rank).exists() and not is_lost:
            how = "" if code < 0 else " and no error"
            return f"rank {rank} of {world_size} {how_it_ended(code)}{how}."
    assert first is not None
    rank, message, trace = first
    absent = absent_ranks(scratch, world_size) if TIMED_OUT.search(message) else ""
    return f"rank {rank} of {world_size} raised {message}\n{absent}\n{trace}"


_GROUPS = itertools.count()
"""Numbers of the groups that this process makes; every rank makes the same groups in the same order."""
WORKERS_REST_S = 0.1
"""Seconds for gloo's threads to free the tensors of the last collective. They need the interpreter for this, and abort
the process if it is ending."""


@contextlib.contextmanager
def process_group(
    topology: Topology, timeout_s: float = 1800.0, scratch: str | None = None
) -> Iterator[None]:
    """Initialise the default process group for the block; an existing group is used and kept.

    gloo carries CPU tensors and NCCL CUDA tensors. `timeout_s` is the longest wait of one collective. Ranks on CPU
    share the cores of their node, unless OMP_NUM_THREADS is set. On one machine gloo listens on the loopback interface
    only, unless GLOO_SOCKET_IFNAME names another. The ranks connect through a store in the folder `scratch`, or through
    torchrun's store if it is omitted. Only ranks may write there, because the store holds the addresses of gloo's
    peers, and ranks unpickle what peers send. On CPU freed memory is kept for the next tensor.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    with (
        contextlib.nullcontext() if topology.is_cuda else keeping_freed_memory(),
        _new_process_group(topology, timeout_s, scratch),
    ):
        yield


@functools.cache
def _store_of_environment(address: str, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Connect to the store at MASTER_ADDR and MASTER_PORT, which is `address`; keep the connection for later groups.

    Without torchrun, rank 0 hosts the store: a rank that makes its next group early must not find the ending one.
    """
    import torch.distributed as dist

    return next(dist.rendezvous("env://", rank, world_size, timeout=timeout))[0]


@contextlib.contextmanager
def _new_process_group(topology: Topology, timeout_s: float, scratch: str | None) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    if topology.is_cuda:
        torch.cuda.set_device(topology.device)
        # cuDNN takes 0.1 to 0.4 s to plan each new shape (sglang 4650), and packed rows have new shapes in every pass.
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        share_cores(topology)
    # srun sets other variables than torch reads.
    os.environ.update(with_rank_variables(os.environ))
    if topology.num_nodes == 1:
        os.environ.update({**on_loopback(), **os.environ})
    store: Any = None
    if topology.world_size == 1:
        store = dist.HashStore()
    elif scratch is not None:
        store = dist.FileStore(f"{scratch}/store", topology.world_size)
        store.set_timeout(timedelta(seconds=timeout_s))
    # The first rank of each node reports the wait, because another machine may never come.
    speaks = topology.local_rank == 0 and topology.world_size > 1
    place = scratch or ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    what = f"rank {topology.rank} is waiting for the other ranks of {topology.world_size}, at {place}"
    with report_wait(what, is_on=speaks):
        if store is None:
            timeout = timedelta(seconds=timeout_s)
            store = _store_of_environment(place, topology.rank, topology.world_size, timeout)
            store.set_timeout(timeout)
            # torch names the keys of every default group alike, and gloo would read the addresses of the last one.
            store = dist.PrefixStore(f"launch-{next(_GROUPS)}", store)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if topology.is_cuda else "gloo",
            store=store,
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=torch.device(topology.device) if topology.is_cuda else None,
        )
        if topology.world_size > 1:
            # torch does not wait for slower ranks here, and they fail if a faster rank ends in the meantime.
            dist.all_reduce(torch.zeros(1))
    try:
        yield
    except BaseException:
        # The steps below wait for peers, which may be gone. A single rank has no peers, and its process may continue.
        if topology.world_size == 1 and dist.is_initialized():
            dist.destroy_process_group()
        raise
    if dist.is_initialized():
        if topology.num_nodes > 1:
            # End together: a torchrun agent whose ranks have returned waits 300 s for the other nodes, does not notice
            # a failure there, and then reports success.
            dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()
        time.sleep(WORKERS_REST_S if topology.world_size > 1 else 0.0)
