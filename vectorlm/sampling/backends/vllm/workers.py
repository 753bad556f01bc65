"""The worker processes of a tensor-parallel engine: how they start, are watched, and end."""

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
"""vLLM watches its workers too, and its error may come this long before the kernel's word reaches us."""


class Workers:
    """The processes that vLLM started for its workers; none where the engine computes in the sampler itself.

    vLLM's workers wait for each other in loops of their own, so one that dies leaves the others spinning. Here its
    death ends the sampler, which rank 0 notices and reports.
    """

    def __init__(self, number: int) -> None:
        """Watch the workers of the engine that this process has just built: one computes in this process."""
        # A lone engine's compilers may leave children too, which may end.
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
        """Stay, if a worker has died, until this process is ended for it: that is the cause of whatever vLLM raised."""
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
        # vLLM watches too, and whoever reaps the process first is told how it ended.
        process.join(REAPED_WITHIN_S)
        self.end()
        print(
            f"worker {number} of {len(self._processes)} of the engine (pid {process.pid}) "
            f"{how_it_ended(process.exitcode)}, so the sampler ends too.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def start_worker() -> None:
    """Prepare a worker process before vLLM builds anything in it.

    vLLM spawns its workers, and a spawned process imports the sampler's main module first of all: that is where this
    is called from. A worker on CPU must keep its plain weights from the start, and every worker must end with the
    sampler although it may be spinning in a reduction when the sampler is killed.
    """
    from vectorlm.sampling.backends.vllm.shim import adapt_to_cpu

    follow_parent(os.getppid(), before_exit=lambda: remove_reduction_buffers([os.getpid()]))
    adapt_to_cpu()


def shorten_socket_paths(folder: str) -> None:
    """Let vLLM's sockets lie in `folder` however long its name is: a socket's whole path may have 107 characters.

    This process's entry for the open folder is a name of it, short, and good for the workers too.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.environ["VLLM_RPC_BASE_PATH"] = f"/proc/{os.getpid()}/fd/{descriptor}"


def remove_reduction_buffers(pids: Iterable[int | None]) -> None:
    """Take away the names of the shared memory that these workers reduce through on CPU; they have mapped it by now.

    vLLM removes the names when a worker ends by itself, so a killed one would leave them behind. Its other shared
    memory is known to Python's resource tracker, which removes it in every case.
    """
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        for name in set(re.findall(rf"{SHARED_MEMORY}/(\S+-cpushm\S*)", maps)):
            (SHARED_MEMORY / name).unlink(missing_ok=True)
