"""A reward that runs the completion's Python against tests, in a process with limits."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence

FENCE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
# The process limits itself before it reads the model's code: a fork with preexec_fn may hang beside threads.
BOOTSTRAP = """
import ctypes, os, resource, sys
seconds, memory, network = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
if not network and ctypes.CDLL(None, use_errno=True).unshare(0x50000000):  # CLONE_NEWUSER | CLONE_NEWNET
    sys.exit(97)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
exec(compile(sys.stdin.read(), "completion", "exec"), {"__name__": "__main__"})
"""
NO_NAMESPACE = 97


def code(
    completion: str,
    tests: Sequence[str],
    *,
    timeout_s: float = 10.0,
    memory_mib: int = 512,
    allow_network: bool = False,
) -> float:
    """Return the share of tests that pass after the completion's code has run.

    The code is the last fence of three backticks, or the whole text. Each test is Python, such as ``assert f(2) == 4``,
    and runs behind the code in a process of its own, with an empty folder, limits of time, memory and file size, and no
    network. This keeps mistakes in; it is not a sandbox against malice: the process may read what its user may read.

    Args:
        completion: The text of the model.
        tests: A column of the prompts.
        timeout_s: Longest time of each test, in seconds.
        memory_mib: Largest address space, in MiB.
        allow_network: Run where the kernel gives no network namespace to ordinary users.

    Raises:
        RuntimeError: The network cannot be taken away here.
    """
    fences = FENCE.findall(completion)
    source = fences[-1] if fences else completion
    limits = [str(int(timeout_s) + 1), str(memory_mib << 20), str(allow_network)]
    passed = 0
    for test in tests:
        with tempfile.TemporaryDirectory() as folder:
            try:
                done = subprocess.run(
                    [sys.executable, "-I", "-c", BOOTSTRAP, *limits],
                    input=f"{source}\n{test}\n".encode(errors="replace"),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env={},
                    timeout=timeout_s,
                    start_new_session=True,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                continue
        if done.returncode == NO_NAMESPACE:
            raise RuntimeError(
                "the reward code cannot take the network away: set allow_network: True, or allow user namespaces"
            )
        passed += done.returncode == 0
    return passed / len(tests)
