"""A reward that runs the completion's Python against tests, in a process with limits."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from vectorlm.plugin import load_plugin, raised_at
from vectorlm.ranks.process_end import how_it_ended
from vectorlm.rl.rewards.shape import fenced

# The process limits itself before it reads the model's code, because preexec_fn may hang in a process with threads.
BOOTSTRAP = """
import ctypes, os, resource, sys
seconds, memory, passed, network = *map(int, sys.argv[1:4]), sys.argv[4] == "True"
if not network and ctypes.CDLL(None, use_errno=True).unshare(0x50000000):  # CLONE_NEWUSER | CLONE_NEWNET
    os.write(passed, b"no namespace")
    sys.exit()
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
mark, source, test = sys.stdin.read().split("\\0")
names = {"__name__": "__main__"}
try:
    try:
        exec(compile(source, "completion", "exec"), names)
    except SystemExit:
        pass
    exec(compile(test, "test", "exec"), names)
    found = mark
except BaseException as error:
    found = f"{type(error).__name__}: {error}"[:200]
os.write(passed, found.encode(errors="replace"))
"""


def code(
    completion: str,
    tests: Sequence[str] | str | None,
    *,
    timeout_s: float = 10.0,
    total_timeout_s: float = 120.0,
    memory_mib: int = 512,
    allow_network: bool = False,
    log: Callable[[str, Any], None] | None = None,
) -> float | None:
    """Run the completion's code against tests; return the share that pass, or None if there are no tests.

    The code is the last fence tagged ``python``, ``python3`` or ``py``; else the last fence without a tag; else the
    whole text. A test is Python code, such as ``assert f(2) == 4``. Every test runs after the code in a separate
    process with an empty folder, limits of time, memory and file size, and no network. A test passes if it runs to its
    end. A test that exits fails. After a test that exceeds the time limit, the others fail without being run. Code that
    ends in ``sys.exit`` is tested like other code. The processes that a test starts end with it, except processes in a
    session of their own, which end with the run.

    This limits the damage of mistakes, but it is not a sandbox against malicious code. The process can read every file
    that its user can read. An object that equals everything passes ``assert f(2) == 4``.

    Args:
        completion: The text of the model.
        tests: A column of the prompts: a list of tests, one test, or a JSON list as text. A test that only defines a
            function always passes.
        timeout_s: Maximum seconds of a test.
        total_timeout_s: Maximum seconds of all tests together; it must be less than ``rl.reward_timeout_s``.
        memory_mib: MiB of memory that the process may write to; memory that it only reserves does not count. NumPy
            and similar libraries use one thread.
        allow_network: Run with network access, for kernels that give ordinary users no network namespace.
        log: Receives the reason why the first test failed, as `failure`.

    Raises:
        RuntimeError: The network cannot be blocked here.
        TypeError: A test is not text. Pairs of inputs and outputs, for example, would always pass.
    """
    listed, num_passed, failure = _listed(tests or ()), 0, ""
    if not listed:
        return None
    source = [completion, *fenced(completion, "python", "python3", "py")][-1]
    end = time.monotonic() + total_timeout_s
    for test in listed:
        mark = secrets.token_hex()
        limit_s = min(timeout_s, max(end - time.monotonic(), 0.0))
        try:
            limits = int(timeout_s) + 1, memory_mib << 20, allow_network
            found, ending = _run(f"{mark}\0{source}\0{test}\n", limits, limit_s)
        except subprocess.TimeoutExpired:
            # The other tests would probably not end either.
            limit = f"{timeout_s:g} s" if limit_s == timeout_s else f"{total_timeout_s:g} s of all tests"
            failure = failure or f"no end within {limit}"
            break
        if found == "no namespace":
            raise RuntimeError(
                "the reward code needs user namespaces to block the network: allow them, or set allow_network: True"
            )
        if found == mark:
            num_passed += 1
        else:
            failure = failure or found or ending
    if failure and log is not None:
        log("failure", failure)
    return num_passed / len(listed)


def _run(text: str, limits: tuple[int, int, bool], limit_s: float) -> tuple[str, str]:
    """Run a test in a process with `limits`: CPU seconds, bytes, network. Return what it wrote, and how it ended.

    Raises:
        subprocess.TimeoutExpired: The test took more than `limit_s` seconds.
    """
    cpu_s, memory, allow_network = limits
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as passed:
        arguments = map(str, (cpu_s, memory, passed.fileno(), allow_network))
        with subprocess.Popen(
            [sys.executable, "-I", "-c", BOOTSTRAP, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            pass_fds=[passed.fileno()],
        ) as process:
            try:
                process.communicate(text.encode(errors="replace"), limit_s)
            finally:
                # Its children outlive it. The kernel does not give its pid to another process soon.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        passed.seek(0)
        return passed.read().decode(errors="replace"), how_it_ended(process.returncode)


def _listed(tests: Sequence[str] | str) -> Sequence[str]:
    found: Sequence[str] = [tests] if isinstance(tests, str) else tests
    if isinstance(tests, str):
        with suppress(ValueError):
            read = json.loads(tests)
            found = read if isinstance(read, list) else found
    if other := [test for test in found if not isinstance(test, str)]:
        raise TypeError(f"the test {str(other[0])[:80]!r} must be a text, such as 'assert f(2) == 4'")
    return found


CPU_S = 3
"""Maximum CPU time of a call, in seconds; other work on the machine does not change it. The kernel ends the process,
because a Python signal handler would wait until a call of C code returns."""
MEMORY_BYTES = 4 << 30
LIMIT = "the call reached a limit, or ended its process"


class OverLimit(Exception):
    """An error of a call that used up its time or memory, or ended its process."""


def limited(package: str, function: str, *arguments: Any) -> Any:
    """Call the function ``module:NAME`` in a process with limits, and return its result.

    The process imports `package` once; a call costs a fraction of a millisecond.

    Raises:
        OverLimit: The call reached a limit.
        RuntimeError: The function raised, or the package cannot be imported; the text names the error and its place.
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
                path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
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
            # Otherwise the next call would read the answer of this call.
            os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
            raise
        if error is not None:
            raise (OverLimit if error == LIMIT else RuntimeError)(error)
        return value


def serve(package: str) -> None:
    """Answer calls in a fork; replace the fork after it has reached a limit."""
    # A call may print to the standard streams, and close them.
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
        # Some scorers evaluate the policy's text, which may call exit().
        except BaseException as raised:
            error, value = raised_at(raised), None
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_called[0] = 0
        send(error, value)
    return os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1])
