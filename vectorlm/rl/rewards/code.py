"""A reward that runs the completion's Python against tests, in a process with limits."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from vectorlm.ranks.process_end import how_it_ended
from vectorlm.rl.rewards.shape import fenced

# The process limits itself before it reads the model's code: a fork with preexec_fn may hang beside threads.
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
    memory_mib: int = 512,
    allow_network: bool = False,
    log: Callable[[str, Any], None] | None = None,
) -> float | None:
    """Return the share of tests that pass after the completion's code has run; None if there are no tests.

    The code is the last fence tagged ``python``, ``python3`` or ``py``; without one the last fence without a tag, or
    the whole text. Each test is Python, such as ``assert f(2) == 4``, and runs behind the code in a process of its own,
    with an empty folder, limits of time, memory and file size, and no network. A test passes if it comes to its end,
    so one that exits fails; code that ends in ``sys.exit`` is tested all the same. This keeps mistakes in; it is not a
    sandbox against malice: the process may read what its user may read, and an object that calls itself equal to
    everything passes ``assert f(2) == 4``.

    Args:
        completion: The text of the model.
        tests: A column of the prompts; a text is one test, or a JSON list of them. One that only defines a function
            passes whatever the code is.
        timeout_s: Longest time of each test, in seconds.
        memory_mib: Largest memory that the process may write to, in MiB; addresses that it only reserves do not count.
            NumPy and the like have one thread.
        allow_network: Run where the kernel gives no network namespace to ordinary users.
        log: Takes why the first test failed, as `failure`.

    Raises:
        RuntimeError: The network cannot be taken away here.
        TypeError: A test is no text: pairs of inputs and outputs, for example, would always pass.
    """
    listed, num_passed, failure = _listed(tests or ()), 0, ""
    if not listed:
        return None
    source = [completion, *fenced(completion, "python", "python3", "py")][-1]
    for test in listed:
        mark = secrets.token_hex()
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as passed:
            limits = [int(timeout_s) + 1, memory_mib << 20, passed.fileno(), allow_network]
            try:
                ended = subprocess.run(
                    [sys.executable, "-I", "-c", BOOTSTRAP, *map(str, limits)],
                    input=f"{mark}\0{source}\0{test}\n".encode(errors="replace"),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env={"OMP_NUM_THREADS": "1"},
                    timeout=timeout_s,
                    start_new_session=True,
                    pass_fds=[passed.fileno()],
                    check=False,
                )
            except subprocess.TimeoutExpired:
                failure = failure or f"no end within {timeout_s:g} s"
                continue
            passed.seek(0)
            found = passed.read()
        if found == b"no namespace":
            raise RuntimeError(
                "the reward code cannot take the network away: set allow_network: True, or allow user namespaces"
            )
        if found == mark.encode():
            num_passed += 1
        else:
            failure = failure or found.decode(errors="replace") or how_it_ended(ended.returncode)
    if failure and log is not None:
        log("failure", failure)
    return num_passed / len(listed)


def _listed(tests: Sequence[str] | str) -> Sequence[str]:
    found: Sequence[str] = [tests] if isinstance(tests, str) else tests
    if isinstance(tests, str):
        with suppress(ValueError):
            read = json.loads(tests)
            found = read if isinstance(read, list) else found
    if other := [each for each in found if not isinstance(each, str)]:
        raise TypeError(f"the test {str(other[0])[:80]!r} must be a text, such as 'assert f(2) == 4'")
    return found
