"""The error that a notebook showed last, which keeps alive what its frames refer to."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from pathlib import Path

_PACKAGE = str(Path(__file__).parent.parent)


def let_go_of_last_error() -> None:
    """Empty this library's frames in the last error that an interactive Python showed; a debugger keeps the caller's.

    An interrupted `engine.sample` leaves the engine in such a frame, and so a sampler process that would outlive the
    cell's next run.
    """
    trace = getattr(sys, "last_traceback", None)
    if trace is None:
        return
    # Errors shown earlier are garbage, but in cycles with their frames.
    gc.collect()
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code.co_filename.startswith(_PACKAGE):
            with contextlib.suppress(RuntimeError):  # It is running.
                frame.clear()
                # Python 3.11 and 3.12 keep a copy of the locals once they are read (IPython does); reading again
                # updates it.
                _ = frame.f_locals
