"""The sampler process: an inference engine, its step loop, and the commands that arrive between two steps.

`vectorlm.sampling.channel` starts it as ``python -m vectorlm.sampling.process <descriptor> <parent> <scratch>``; no
trainer imports it. A weight update happens between two engine steps by construction.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vectorlm.contracts import INFERENCES, Inference
from vectorlm.errors import EngineError
from vectorlm.plugin import is_plugin, load_plugin
from vectorlm.ranks.placement import settle
from vectorlm.ranks.watchdog import follow_parent, remove_folder
from vectorlm.sampling import messages as say
from vectorlm.sampling.channel import CORES_VARIABLE
from vectorlm.sampling.sampler import Sampler, portable
from vectorlm.sampling.workers import shorten_socket_paths, start_worker

ALIVE_EVERY_S = 1.0


def open_inference(start: say.Start) -> Inference:
    """Build the engine that `start` names.

    Raises:
        EngineError: There is none of that name, or it takes other arguments.
    """
    name = INFERENCES.get(start.inference, start.inference)
    if not is_plugin(name):
        raise EngineError(
            f"inference={start.inference!r} is not known: it must be one of {', '.join(INFERENCES)}, or a class as "
            "module:Class or file.py:Class."
        )
    make = load_plugin(name)
    try:
        inspect.signature(make).bind(start.model, receiver=start.receiver, **start.engine_args)
    except TypeError as error:
        raise EngineError(f"inference={start.inference!r} cannot be built: {error}.") from error
    inference: Inference = make(start.model, receiver=start.receiver, **start.engine_args)
    return inference


def serve(connection: Connection) -> None:
    """Answer commands until `Stop` or the end of the connection."""
    began = time.perf_counter()
    number, start = connection.recv()
    try:
        inference = open_inference(start)
    except Exception as error:
        # Not printed: rank 0 gets the text, and shows what a parallel engine's workers printed last beside it.
        connection.send((number, say.Failed(portable(error))))
        # A process that is gone would be news of its own, and might be read first: stay until rank 0 lets go.
        while not isinstance(connection.recv()[1], say.Stop):
            pass
        return
    sampler = Sampler(inference)
    ready = say.Ready(inference.receiver, time.perf_counter() - began, inference.max_num_seqs)
    connection.send((number, ready))
    last_sign = time.monotonic()
    while True:
        while not sampler.busy or connection.poll():
            number, command = connection.recv()
            if isinstance(command, say.Stop):
                inference.close()
                return
            answer = _answer(sampler, number, command)
            for numbered in sampler.lost:
                connection.send(numbered)
            sampler.lost.clear()
            if answer is not None:
                connection.send((number, answer))
        for numbered in _step(sampler):
            connection.send(numbered)
        if time.monotonic() - last_sign > ALIVE_EVERY_S:
            connection.send((None, say.Alive()))
            last_sign = time.monotonic()


def _step(sampler: Sampler) -> list[tuple[int, Any]]:
    """Take one engine step; one that raises answers every request under way, and there is no next one."""
    try:
        return list(sampler.step())
    except Exception as error:
        return [(number, say.Failed(portable(error))) for number in sampler.give_up(error)]


def _answer(sampler: Sampler, number: int, command: Any) -> Any:
    """Carry out one command; return its answer, or None where it comes later or never."""
    try:
        match command:
            case say.Generate():
                return sampler.generate(number, command)
            case say.Abort():
                return sampler.abort(command.generate)
            case say.Connect():
                return sampler.connect(command)
            case say.BeginUpdate():
                return sampler.begin_update(command)
            case say.FinishUpdate():
                return sampler.finish_update(command)
            case say.Sleep():
                return sampler.sleep(command)
            case say.WakeUp():
                return sampler.wake_up(command)
        raise EngineError(f"the sampler knows no command {type(command).__name__}.")
    except Exception as error:
        return say.Failed(portable(error))


def main() -> None:
    """Run the process that `vectorlm.sampling.channel` starts."""
    descriptor, parent, scratch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if cores := os.environ.get(CORES_VARIABLE):
        settle([int(core) for core in cores.split(",")])
    follow_parent(parent, scratch)
    shorten_socket_paths(scratch)
    # Where the other end is gone, nothing is left to do and nobody to tell.
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        serve(connection)
    # Rank 0 removes this too, unless it was killed.
    remove_folder(Path(scratch))
    # vLLM's own teardown can take seconds and has nothing to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    start_worker()
