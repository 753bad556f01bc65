"""Calls that a policy's words may keep busy for hours, in a process with limits."""

from __future__ import annotations

import mmap
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from functools import cache
from importlib import import_module
from typing import Any

from vectorlm.plugin import load_plugin, raised_at

CPU_S = 3
"""Processor time of a call, which does not depend on what else the machine does. The kernel ends the process after it:
a Python signal handler would not run before a call of C code returns."""
MEMORY_BYTES = 4 << 30
LIMIT = "the call has reached a limit, or has ended its process"


class OverLimit(Exception):
    """A call has used up its time or memory, or has ended the process."""


def limited(package: str, function: str, *arguments: Any) -> Any:
    """Return what a function, by its name ``module:NAME``, returns in a process with limits.

    The process imports `package` once; a call costs a fraction of a millisecond.

    Raises:
        OverLimit: The call has reached a limit.
        RuntimeError: The function has raised, or the package cannot be imported; the text says what and where.
    """
    return _process(os.getpid(), package).call(function, arguments)


@cache
def _process(pid: int, package: str) -> _Process:
    return _Process(package)


class _Process:
    def __init__(self, package: str) -> None:
        self._package, self._lock = package, threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            if self._running is None or self._running.poll() is not None:
                path = os.pathsep.join(each or os.getcwd() for each in sys.path)
                self._running = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, self._package],
                    env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
                self._answer()
            assert self._running.stdin is not None
            pickle.dump((CPU_S, function, arguments), self._running.stdin)
            self._running.stdin.flush()
            try:
                return self._answer()
            except EOFError:
                raise OverLimit(LIMIT) from None

    def _answer(self) -> Any:
        assert self._running is not None
        assert self._running.stdout is not None
        try:
            error, value = pickle.load(self._running.stdout)
        except BaseException:
            # An answer that nobody waits for would be the next call's.
            os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
            raise
        if error is not None:
            raise (OverLimit if error == LIMIT else RuntimeError)(error)
        return value


def serve(package: str) -> None:
    """Answer calls in a fork, which is replaced when it has reached a limit."""
    # A call may print, and close the usual streams.
    asked, answers, is_called = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), mmap.mmap(-1, 1)
    os.dup2(2, 1)

    def send(error: str | None, value: Any = None) -> None:
        pickle.dump((error, value), answers)
        answers.flush()

    try:
        import_module(package)
    except Exception as raised:
        return send(raised_at(raised))
    send(None)
    while pid := os.fork():
        os.waitpid(pid, 0)
        if is_called[0]:
            send(LIMIT)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while asked.peek(1):
        cpu_s, name, arguments = pickle.load(asked)
        is_called[0], function = 1, load_plugin(name)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            error, value = None, function(*arguments)
        # Some scorers evaluate what a policy has written, which may be exit().
        except BaseException as raised:
            error, value = raised_at(raised), None
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_called[0] = 0
        send(error, value)
    return os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1])
