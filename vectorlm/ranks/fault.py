"""The note that a failing rank leaves for its supervisor, in torch elastic's error-file format."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """Why a rank ended."""

    rank: int
    """The rank that failed."""
    time_s: float
    """Seconds since the epoch when it failed: the earliest fault of a run is its cause."""
    message: str
    """The exception's type and text."""
    traceback: str
    """The rank's own traceback; may be empty."""


def write_fault(path: str | Path, rank: int, error: BaseException) -> None:
    """Leave `error` at `path`; an earlier note is kept, for it is nearer to the cause."""
    if Path(path).exists():
        return
    trace = "".join(traceback.format_exception(error))
    details = {"py_callstack": trace, "timestamp": str(int(time.time())), "time_s": time.time(), "rank": rank}
    note = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(note))
    partial.rename(path)


def read_faults(folder: str | Path) -> list[Fault]:
    """Return the faults left anywhere below `folder`, earliest first."""
    faults = []
    for path in Path(folder).rglob("error.json"):
        note = json.loads(path.read_text())["message"]
        details = note["extraInfo"]
        if "time_s" in details:
            faults.append(Fault(details["rank"], details["time_s"], note["message"], details["py_callstack"]))
    return sorted(faults, key=lambda fault: fault.time_s)
