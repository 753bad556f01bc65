"""The worker processes of a tensor-parallel engine: start, watch and end them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from vectorlm.ranks.process_end import follow_parent, how_it_ended

SHARED_MEMORY = Path("/dev/shm")
REAPED_WITHIN_S = 1.0
ENDED_WITHIN_S = 10.0
NOTICED_WITHIN_S = 0.5
"""Seconds by which vLLM, which also watches its workers, may raise before we see the end of a process."""


class Workers:
    """The worker processes that vLLM started; none if the engine computes in the sampler process.

    vLLM's workers wait for each other in busy loops: if one dies, the others spin. We end the sampler instead, and rank
    0 reports that.
    """

    def __init__(self, number: int) -> None:
        """Watch the `number` workers of the engine that this process has just built."""
        # The children of an engine without workers are compilers, which may end.
        children = multiprocessing.active_children() if number > 1 else []
        self._processes = sorted(children, key=lambda process: process.name)
        self._ending = threading.Event()
        if self._processes:
            remove_reduction_buffers(process.pid for process in self._processes)
            threading.Thread(target=self._end_with_the_first, name="watch-workers", daemon=True).start()

    def end(self) -> None:
        """End the workers; safe to call twice."""
        self._ending.set()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def let_the_dead_be_named(self) -> None:
        """If a worker has died, wait until this process ends for that reason, because the death caused vLLM's error."""
        sentinels = [process.sentinel for process in self._processes]
        if sentinels and multiprocessing.connection.wait(sentinels, NOTICED_WITHIN_S):
            time.sleep(ENDED_WITHIN_S)

    def _end_with_the_first(self) -> None:
        died = multiprocessing.connection.wait([process.sentinel for process in self._processes])
        if self._ending.is_set():
            return
        number, process = next(
            (number, process) for number, process in enumerate(self._processes) if process.sentinel in died
        )
        # vLLM may reap the process first; then its exit code is unknown here.
        process.join(REAPED_WITHIN_S)
        self.end()
        print(
            f"worker {number} of {len(self._processes)} of the engine (pid {process.pid}) "
            f"{how_it_ended(process.exitcode)}. The sampler ends too.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def start_worker() -> None:
    """Prepare a worker process before vLLM builds anything in it.

    The sampler's main module calls this, because a spawned worker imports that module first. A worker on CPU must keep
    its plain weights from the start. Every worker must end with the sampler, even while it spins in a reduction.
    """
    from vectorlm.sampling.backends.vllm.shim import adapt_to_cpu

    follow_parent(os.getppid(), before_exit=lambda: remove_reduction_buffers([os.getpid()]))
    adapt_to_cpu()


def shorten_socket_paths(folder: str) -> None:
    """Put vLLM's sockets into `folder`, whose path may be long: the path of a socket is limited to 107 characters.

    The process's ``/proc`` entry of the open folder is a short path, which works in the workers too.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.environ["VLLM_RPC_BASE_PATH"] = f"/proc/{os.getpid()}/fd/{descriptor}"


def remove_reduction_buffers(pids: Iterable[int | None]) -> None:
    """Unlink the shared memory of these workers' reductions on CPU, which they have already mapped.

    vLLM unlinks it only if a worker ends normally. Python's resource tracker removes all other shared memory.
    """
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        for name in set(re.findall(rf"{SHARED_MEMORY}/(\S+-cpushm\S*)", maps)):
            (SHARED_MEMORY / name).unlink(missing_ok=True)
