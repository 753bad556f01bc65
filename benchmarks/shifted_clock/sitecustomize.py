"""Shifts the clock that Python shows by the seconds in the file $FAULTS/clock; put on PYTHONPATH by faults.py."""

import os
import time

_time, _time_ns = time.time, time.time_ns
_PATH = os.environ["FAULTS"] + "/clock"


def _shift() -> int:
    try:
        with open(_PATH) as file:
            return int(file.read() or 0)
    except OSError:
        return 0


time.time = lambda: _time() + _shift()
time.time_ns = lambda: _time_ns() + _shift() * 10**9
