"""A thread that ends this process when the process that started it is gone."""

from __future__ import annotations

import os
import shutil
import threading
import time

POLL_S = 0.25


def follow_parent(parent_pid: int, scratch: str | None = None) -> None:
    """End this process soon after `parent_pid` stops being its parent, however that came about.

    A killed parent cannot tell its children; the kernel does, by handing them to another parent. Works while the
    main thread is inside a collective or an engine step, where no Python signal handler would run.

    Args:
        parent_pid: The process to follow, as its child knew it at the start.
        scratch: A folder to delete on the way out, for a parent that was killed could not.
    """
    threading.Thread(target=_follow, args=(parent_pid, scratch), name="follow-parent", daemon=True).start()


def _follow(parent_pid: int, scratch: str | None) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)
