"""The error that a notebook showed last, which keeps alive whatever its frames refer to."""

from __future__ import annotations

import gc
import sys
import traceback
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parent.parent)


def let_go_of_last_error() -> None:
    """Empty the frames of this library in the last error that an interactive Python showed.

    An interrupted `engine.sample` leaves the engine in such a frame, and with it a sampler process that would outlive
    the cell's next run. Frames of the caller's own are left for a debugger.
    """
    trace = getattr(sys, "last_traceback", None)
    if trace is None:
        return
    # Errors shown before the last one are garbage, but in cycles with their frames.
    gc.collect()
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code.co_filename.startswith(_PACKAGE):
            _empty(frame)


def _empty(frame: FrameType) -> None:
    try:
        frame.clear()
    except RuntimeError:
        return  # It is running.
    # Python 3.11 and 3.12 keep a second copy once somebody has looked (IPython does, to show it); looking again
    # brings it up to date, which is to say empties it.
    _ = frame.f_locals
