"""The sampler process: a vLLM engine, its step loop, and the commands that arrive between two steps.

`vectorlm.sampling.channel` starts it as ``python -m vectorlm.sampling.process <descriptor> <parent> <scratch>``; no
trainer imports it. A weight update happens between two engine steps by construction.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vectorlm.errors import EngineError, VectorLMError
from vectorlm.ranks.watchdog import follow_parent, remove_folder
from vectorlm.sampling import messages as say
from vectorlm.sampling.bed import make_bed
from vectorlm.sampling.packed import pack_outputs
from vectorlm.sampling.parts import SwappedParts
from vectorlm.sampling.request_outputs import pack_request_outputs
from vectorlm.sampling.rest import Rest, parts_of
from vectorlm.sampling.version_spans import VersionSpans
from vectorlm.sampling.vllm_shim import build_engine, let_seeded_requests_wait, make_prompt, per_prompt
from vectorlm.sampling.warm_up import naming_the_model, warm_up
from vectorlm.sampling.workers import Workers, shorten_socket_paths, start_worker
from vectorlm.telemetry.timers import Timer
from vectorlm.types import InFlight, Prompt
from vectorlm.weights.pack import keep_plain_weights

ALIVE_EVERY_S = 1.0


@dataclass
class Group:
    """The prompts of one `Generate`, on their way."""

    ids: list[str]
    as_request_outputs: bool
    finished: dict[str, Any] = field(default_factory=dict)


class Sampler:
    """Owns the engine; every method runs between two engine steps."""

    def __init__(self, start: say.Start) -> None:
        import torch

        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            keep_plain_weights()
            let_seeded_requests_wait()
        with naming_the_model(start.model):
            self._engine = build_engine(start.model, start.engine_args, on_cpu)
            self.workers = Workers()
            self._parts = SwappedParts(
                self._engine.collective_rpc, bool(start.engine_args.get("enable_lora"))
            )
            self.receiver = self._parts.prepare(start.receiver)
            warm_up(self._engine)
        bed = make_bed(self._engine, on_cpu)
        self._rest = Rest(bed.drop, bed.restore)
        self._groups: dict[int, Group] = {}
        self._version = -1
        self._spans = VersionSpans()
        self._clock = Timer()
        self._in_flight: InFlight = "refuse"
        self._paused_at = 0.0
        self._stale: Exception | None = None
        self._broken: Exception | None = None
        self.paused = False
        self.lost: list[tuple[int, say.Failed]] = []
        """Answers for requests that an update took with it; whoever sends them empties this."""

    @property
    def max_num_seqs(self) -> int:
        """Sequences that the engine samples from at a time."""
        return self._engine.vllm_config.scheduler_config.max_num_seqs

    @property
    def busy(self) -> bool:
        """Whether there is a step to take."""
        return not self.paused and bool(self._groups)

    def generate(self, number: int, command: say.Generate) -> None:
        """Queue the prompts of one command; either all of them or none."""
        for obstacle in (self._broken, self._stale):
            if obstacle is not None:
                raise obstacle
        if self.paused:
            raise EngineError("an update was begun and never finished: update again before sampling.")
        self._rest.check_sampling()
        params = per_prompt(command.sampling_params, len(command.prompts))
        group = self._groups[number] = Group([], command.as_request_outputs)
        try:
            for index, (prompt, each) in enumerate(zip(command.prompts, params, strict=True)):
                name = f"{number}-{index}"
                self._add(index, name, prompt, each)
                group.ids.append(name)
        except BaseException:
            self.abort(number)
            raise

    def _add(self, index: int, name: str, prompt: Prompt, params: Any) -> None:
        try:
            request = make_prompt(self._engine, prompt)
            # Blocks of other weights are never found, however long requests of theirs keep them.
            request["cache_salt"] = f"version {self._version}"
            self._engine.add_request(name, request, params, lora_request=self._parts.adapter_request)
        except VectorLMError:
            raise
        except Exception as error:
            raise EngineError(f"prompt {index} cannot be sampled: {type(error).__name__}: {error}") from error

    def abort(self, number: int) -> None:
        """Forget the prompts of one command; unknown ones are gone already."""
        if group := self._groups.pop(number, None):
            self._engine.abort_request([name for name in group.ids if name not in group.finished])
            self._spans.forget(group.ids)

    def step(self) -> list[tuple[int, say.Generated | say.Failed]]:
        """Take one engine step; return the answers that it completed."""
        with self._clock.span("step"):
            outputs = self._engine.step()
        for output in outputs:
            group = self._groups.get(int(output.request_id.partition("-")[0]))
            if output.finished and group is not None:
                group.finished[output.request_id] = output
        done = [number for number, group in self._groups.items() if len(group.finished) == len(group.ids)]
        return [(number, self._packed(self._groups.pop(number))) for number in done]

    def give_up(self, error: Exception) -> list[int]:
        """Forget every request after a step that raised: the engine's own state is unknown from here on."""
        self._broken = EngineError(f"the engine failed in an earlier step and must be built anew: {error}")
        numbers = list(self._groups)
        self._groups.clear()
        return numbers

    def connect(self, command: say.Connect) -> say.Connected:
        """Match the trainer's tensors with the engine's."""
        return say.Connected(self._parts.connect(command))

    def begin_update(self, command: say.BeginUpdate) -> say.Paused:
        """Stand still: the ranks write into memory that the engine computes with."""
        if self._groups and command.in_flight == "refuse":
            raise EngineError(
                f"{len(self._groups)} requests are under way: wait for them, or say what becomes of them (in_flight)."
            )
        self._rest.begin_update()
        self.paused, self._in_flight, self._paused_at = True, command.in_flight, time.perf_counter()
        return say.Paused()

    def finish_update(self, command: say.FinishUpdate) -> say.Updated:
        """Take the new weights over; until an update succeeds after a failed one, refuse to generate."""
        self.paused = False
        num_running = len(self._groups)
        try:
            load_s = self._parts.load(command)
            self._leave_old_cache()
        except Exception as error:
            # Nobody knows what weights those under way would go on with.
            self._stale = error
            for number in list(self._groups):
                self.abort(number)
                self.lost.append((number, say.Failed(EngineError(f"a weight update failed: {error}"))))
            raise
        self._spans.close(self._engine, self._version)
        self._version, self._stale = command.version, None
        self._rest.finish_update()
        stall_s = time.perf_counter() - self._paused_at if num_running else 0.0
        busy = tuple((start, end) for _, start, end in self._clock.spans)
        self._clock = Timer()
        return say.Updated(load_s, stall_s, busy)

    def _leave_old_cache(self) -> None:
        """Let nothing new be computed from blocks of the old weights, but for requests that keep their own."""
        if not self._groups:
            if not self._engine.reset_prefix_cache():
                raise EngineError("the prefix cache still holds blocks of the old weights.")
        elif self._in_flight == "recompute":
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def sleep(self, command: say.Sleep) -> say.Rested:
        """Give device memory away."""
        parts = parts_of(weights=command.weights, kv_cache=command.kv_cache)
        self._rest.sleep(parts, num_requests=len(self._groups))
        return say.Rested()

    def wake_up(self, command: say.WakeUp) -> say.Rested:
        """Take device memory back."""
        self._rest.wake_up(parts_of(weights=command.weights, kv_cache=command.kv_cache))
        return say.Rested()

    def _packed(self, group: Group) -> say.Generated | say.Failed:
        """Return the answer; somebody waits for it, so one that cannot be made is an answer too."""
        try:
            return self._pack(group)
        except Exception as error:
            return say.Failed(_portable(error))

    def _pack(self, group: Group) -> say.Generated:
        outputs = [group.finished[name] for name in group.ids]
        if not group.as_request_outputs:
            versions = self._spans.of(outputs, self._version)
            return say.Generated(pack_outputs(outputs, versions).arrays())
        for index, output in enumerate(outputs):
            output.request_id = str(index)
        return say.Generated(pack_request_outputs(outputs).arrays())


def serve(connection: Connection) -> None:
    """Answer commands until `Stop` or the end of the connection."""
    began = time.perf_counter()
    number, start = connection.recv()
    try:
        sampler = Sampler(start)
    except Exception as error:
        # Not printed: rank 0 gets the text, and shows what a parallel engine's workers printed last beside it.
        connection.send((number, say.Failed(_portable(error))))
        # A process that is gone would be news of its own, and might be read first: stay until rank 0 lets go.
        while not isinstance(connection.recv()[1], say.Stop):
            pass
        return
    ready = say.Ready(sampler.receiver, time.perf_counter() - began, sampler.max_num_seqs)
    connection.send((number, ready))
    last_sign = time.monotonic()
    while True:
        while not sampler.busy or connection.poll():
            number, command = connection.recv()
            if isinstance(command, say.Stop):
                sampler.workers.end()
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
        sampler.workers.let_the_dead_be_named()
        return [(number, say.Failed(_portable(error))) for number in sampler.give_up(error)]


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
        return say.Failed(_portable(error))


def _portable(error: Exception) -> Exception:
    """Return an error that unpickles in a process without vLLM, with this process's traceback in its text."""
    if isinstance(error, VectorLMError):
        return error
    return EngineError(
        f"{type(error).__name__}: {error}\n\nIn the sampler process:\n{traceback.format_exc()}"
    )


def main() -> None:
    """Run the process that `vectorlm.sampling.channel` starts."""
    descriptor, parent, scratch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
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
