"""Forks of the test's process that act as another process: a new interpreter takes seconds to import torch."""

import os
import pickle
import signal


def fork(work):
    """Call `work` in a fork, which stays alive until it is killed; return its pid and the result of `work`."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(writer, pickle.dumps(work()))
            os.close(writer)
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        return pid, pickle.load(answer)


def kill(pid):
    """Kill a fork."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
