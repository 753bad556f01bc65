"""The sampler process: a loop that steps a backend and carries out commands between two steps.

`ProcessChannel` starts it as ``python -m vectorlm.sampling.sampler.process <descriptor> <parent> <scratch>``.

A backend's module may define hooks: ``prepare_process(scratch)`` runs before the backend is built, with a folder
that is removed with the process; ``start_worker()`` runs first in every process that multiprocessing spawns from this.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vectorlm.errors import EngineError
from vectorlm.plugin import is_plugin, load_plugin
from vectorlm.ranks.engine_ranks import portable
from vectorlm.ranks.process_end import follow_parent, remove_folder
from vectorlm.ranks.topology import set_affinity, without_gc
from vectorlm.sampling import messages
from vectorlm.sampling.contract import BACKENDS
from vectorlm.sampling.process_channel import CORES_VARIABLE
from vectorlm.sampling.sampler.scheduler import SAMPLER, Scheduler, open_backend, ready

ALIVE_EVERY_S = 1.0
BACKEND_VARIABLE = "VECTORLM_SAMPLER_BACKEND"
"""The backend, for spawned processes."""


def call_hook(inference: str, name: str, *args: Any) -> None:
    """Call the function `name` of the backend's module, or of a base class's module, if it exists."""
    plugin = BACKENDS.get(inference, inference)
    if not is_plugin(plugin):
        return  # `open_backend` refuses such a name.
    backend = load_plugin(plugin)
    for kind in getattr(backend, "__mro__", (backend,)):
        hook = getattr(sys.modules.get(kind.__module__), name, None)
        if hook is not None:
            hook(*args)
            return


def serve(connection: Connection, scratch: str) -> None:
    """Answer commands until `Stop` or the end of the connection."""
    began = time.perf_counter()
    [(number, message)] = connection.recv()
    try:
        start = pickle.loads(message)
        os.environ[BACKEND_VARIABLE] = start.inference
        with without_gc():
            call_hook(start.inference, "prepare_process", scratch)
            backend = open_backend(start)
    except Exception as error:
        _tell(connection, number, (None, portable(error, SAMPLER)))
        # Stay until `Stop`: rank 0 might see the end of this process before the answer.
        while not _is_stop(connection.recv()):
            pass
        return
    scheduler, pictures = Scheduler(backend, start.model), messages.KeptPictures()
    _tell(connection, number, (ready(backend, time.perf_counter() - began), None))
    last_sign = time.monotonic()
    while True:
        while not scheduler.busy or connection.poll():
            for number, message in connection.recv():
                try:
                    command = pictures.decode(message)
                except Exception as error:
                    text = (
                        f"the sampler process cannot read this call: {type(error).__name__}: {error}. It imports no "
                        "script or notebook: use no types from there in prompts and sampling parameters."
                    )
                    _tell(connection, number, (None, EngineError(text)))
                    continue
                if isinstance(command, messages.Stop):
                    scheduler.close()
                    return
                for numbered in scheduler.carry_out(number, command):
                    _tell(connection, *numbered)
        for told in scheduler.step():
            _tell(connection, *told)
        if scheduler.has_progressed and time.monotonic() - last_sign > ALIVE_EVERY_S:
            _tell(connection, -1, (None, None))  # A sign of life.
            last_sign, scheduler.has_progressed = time.monotonic(), False


def _tell(connection: Connection, number: int, content: Any) -> None:
    """Send the rank an answer, or the error of an answer that cannot be pickled; see `messages.read_answer`."""
    try:
        pickled = pickle.dumps(content)
    except Exception as error:
        pickled = pickle.dumps((None, portable(error, SAMPLER)))
    # Two pickles: the rank must learn the number of an answer that it cannot read.
    connection.send_bytes(pickle.dumps(number) + pickled)


def _is_stop(received: Any) -> bool:
    """Return whether a message is `Stop`, which is sent alone and without pictures."""
    _, message = received[0]
    return isinstance(message, bytes) and isinstance(pickle.loads(message), messages.Stop)


def run(arguments: list[str]) -> None:
    """Run the sampler process with these arguments."""
    descriptor, parent, scratch = int(arguments[0]), int(arguments[1]), arguments[2]
    if cores := os.environ.get(CORES_VARIABLE):
        set_affinity([int(core) for core in cores.split(",")])
    follow_parent(parent, scratch)
    # If the other end is gone, nobody reads the error.
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        serve(connection, scratch)
    # Rank 0 removes this too, unless it was killed.
    remove_folder(Path(scratch))
    # vLLM's teardown can take seconds and saves nothing.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    run(sys.argv[1:])
elif __name__ == "__mp_main__":
    call_hook(os.environ[BACKEND_VARIABLE], "start_worker")
