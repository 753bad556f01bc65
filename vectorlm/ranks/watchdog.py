"""A thread that ends this process when the process that started it is gone, or asks for it."""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
POLL_S = 0.25
REMOVE_WITHIN_S = 3.0

OVER = "over"
"""A file of this name in the scratch folder asks the ranks to end: another node of the run has failed."""


def follow_parent(
    parent_pid: int, scratch: str | None = None, before_exit: Callable[[], None] = lambda: None
) -> None:
    """End this process soon after `parent_pid` stops being its parent, however that came about.

    A killed parent cannot tell its children; the kernel does, by handing them to another parent. Works while the
    main thread is inside a collective or an engine step, where no Python signal handler would run.

    Args:
        parent_pid: The process to follow, as its child knew it at the start.
        scratch: A folder to delete on the way out, for a parent that was killed could not. While the parent lives, a
            file `OVER` in it ends this process too.
        before_exit: What else to do when the parent is gone.
    """
    # torch's spawn asks the kernel for a signal at the parent's death, which would end us before we tidied up.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    what = (parent_pid, scratch, before_exit)
    threading.Thread(target=_follow, args=what, name="follow-parent", daemon=True).start()


def _follow(parent_pid: int, scratch: str | None, before_exit: Callable[[], None]) -> None:
    over = None if scratch is None else Path(scratch, OVER)
    while os.getppid() == parent_pid:
        if over is not None and over.exists():
            os._exit(1)
        time.sleep(POLL_S)
    if scratch is not None:
        remove_folder(Path(scratch))
    before_exit()
    os._exit(1)


def remove_folder(folder: Path) -> None:
    """Delete `folder` although siblings do the same at this moment, and may still be writing into it."""
    deadline = time.monotonic() + REMOVE_WITHIN_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(POLL_S / 5)
