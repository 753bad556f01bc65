"""Forks of the test's process, for what another process does: a fresh interpreter takes seconds to import torch."""

import os
import pickle
import signal


def fork(work):
    """Call `work` in a fork, which then stays until it is killed; return its pid and what `work` returned."""
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
    """End a fork."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
