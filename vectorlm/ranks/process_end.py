"""The end of a process: with its parent, with an error file for torch's agent, and without temporary folders."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import glob
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vectorlm.errors import EngineError, VectorLMError

PR_SET_PDEATHSIG = 1
POLL_S = 0.25
REMOVE_WITHIN_S = 3.0
LOST_PEER = re.compile("(?i)connection (reset|closed) by peer")


def require_own_process(pid: int) -> None:
    """Raise `EngineError` in a fork of process `pid`: a fork has none of its threads, and every wait would hang."""
    if os.getpid() != pid:
        raise EngineError(
            f"this engine belongs to process {pid}, and this is process {os.getpid()}, a fork of it (a worker of a "
            "DataLoader, perhaps): call it in the process that built it."
        )


def follow_parent(
    parent_pid: int, scratch: str | None = None, before_exit: Callable[[], None] = lambda: None
) -> None:
    """End this process soon after `parent_pid` stops being its parent, even if the parent was killed.

    A killed parent cannot tell its children, but the kernel gives them another parent. This works while the main
    thread is inside a collective or an engine step, where no Python signal handler would run.

    Before the exit it deletes the folder `scratch`, because a killed parent could not, and calls `before_exit`.
    """
    # torch's spawn asks the kernel for a signal at the parent's death that would end us before the clean-up. SIGCONT
    # does not, and it wakes a stopped process, which would not notice the death.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)

    def follow() -> None:
        while os.getppid() == parent_pid:
            time.sleep(POLL_S)
        if scratch is not None:
            remove_folder(Path(scratch))
        before_exit()
        os._exit(1)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()


def without_tracker_warnings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that silences Python's resource tracker when it cleans up after an ended process."""
    filters = (environment.get("PYTHONWARNINGS"), "ignore:resource_tracker")
    return {"PYTHONWARNINGS": ",".join(filter(None, filters))}


@contextlib.contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """Make a temporary folder in `parent` for the block, and delete the folders of `name` that killed processes left.

    A folder is locked while its process lives. Other machines may not see the lock, so the folder's name has the host.
    """

    def lock(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        opened.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    prefix = f"{name}{os.uname().nodename}-"
    with contextlib.ExitStack() as opened:
        for leftover in parent.glob(f"{glob.escape(prefix)}*"):
            # It is in use, or the file system has no locks.
            with contextlib.suppress(OSError):
                lock(leftover)
                shutil.rmtree(leftover)
        folder = Path(tempfile.mkdtemp(prefix=".", dir=parent))
        with contextlib.suppress(OSError):
            lock(folder)
        # It gets the name after the lock: no other process may take it for a leftover.
        folder = folder.rename(parent / f"{prefix}{folder.name[1:]}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete `folder`, even while sibling processes delete it too or still write to it."""
    deadline = time.monotonic() + REMOVE_WITHIN_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(POLL_S / 5)


def how_it_ended(code: int | None) -> str:
    """Describe how a process with this exit code ended; None if the code is unknown."""
    if code is None:
        return "is gone"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def write_fault(path: str | Path, rank: int, error: BaseException) -> None:
    """Write `error` to `path` in the format of torch elastic; keep an earlier error, which is nearer to the cause."""
    if Path(path).exists():
        return
    trace = "".join(traceback.format_exception(error))
    details = {"py_callstack": trace, "timestamp": str(int(time.time())), "time_s": time.time(), "rank": rank}
    noted = error.rank if isinstance(error, VectorLMError) else None
    details["of_rank"] = rank if noted is None else noted
    note = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(note))
    partial.rename(path)


def end_with_threads_without_memory(path: str | Path, rank: int) -> None:
    """End this rank if one of its threads dies for lack of memory; a wait for that thread would hang.

    This includes a thread that fails while it starts, for which `threading.Thread.start` waits without a limit.
    """
    of_thread, of_beginning = threading.excepthook, sys.unraisablehook

    def end_if_memory(error: BaseException | None) -> None:
        # A thread that has not started has no number yet, and an error about that hides the cause.
        while not isinstance(error, MemoryError):
            if error is None:
                return
            error = error.__context__
        try:
            write_fault(path, rank, error)
        finally:
            os._exit(1)

    def hear_of_thread(what: threading.ExceptHookArgs) -> None:
        of_thread(what)
        end_if_memory(what.exc_value)

    def hear_of_beginning(what: sys.UnraisableHookArgs) -> None:
        of_beginning(what)
        end_if_memory(what.exc_value)

    threading.excepthook, sys.unraisablehook = hear_of_thread, hear_of_beginning


def write_stack_at_end(folder: str | Path, rank: int) -> None:
    """Make SIGTERM, with which torch's agent ends a rank, write this rank's Python stack to `folder` first."""
    file = Path(folder, f"rank-{rank}.stack").open("w")  # noqa: SIM115 (open for as long as the process lives)
    # faulthandler works in C: during an endless computation no Python signal handler runs.
    faulthandler.register(signal.SIGTERM, file=file, all_threads=False, chain=True)


def absent_ranks(folder: str | Path, world_size: int) -> str:
    """Describe where the ranks without an error file below `folder` were when they were ended."""
    raised = {note["extraInfo"].get("rank") for note in _error_notes(folder)}
    text = ""
    for rank in sorted(set(range(world_size)) - raised):
        note = Path(folder, f"rank-{rank}.stack")
        stack = note.read_text() if note.exists() else ""
        where = (
            f"it was here when it was ended:\n{stack}" if stack else "it was stopped, or hung outside Python."
        )
        text += f"\nrank {rank} of {world_size} raised no error and did not reach the collective: {where}"
    return text


def first_fault(folder: str | Path) -> tuple[int, str, str] | None:
    """Return rank, message and traceback of the earliest error in the error files below `folder`.

    A lost connection ranks after every other error: a peer without memory loses its connection before it reports why.
    """
    faults = []
    for note in _error_notes(folder):
        message, details = note["message"], note["extraInfo"]
        if "time_s" in details:
            is_lost = LOST_PEER.search(message) is not None
            faults.append((is_lost, details["time_s"], details["of_rank"], message, details["py_callstack"]))
    return min(faults)[2:] if faults else None


def _error_notes(folder: str | Path) -> list[dict[str, Any]]:
    """Return the messages of the error files below `folder`."""
    # Not rglob, which raises if a folder is removed in the meantime, for example by a sampler whose rank is gone.
    found = [Path(place, "error.json") for place, _, files in os.walk(folder) if "error.json" in files]
    return [json.loads(path.read_text())["message"] for path in found]
