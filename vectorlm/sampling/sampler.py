"""The rules of a sampler process: what may be asked of its inference engine, and when."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vectorlm.contracts import Finished, Inference
from vectorlm.errors import EngineError, VectorLMError
from vectorlm.sampling import messages as say
from vectorlm.sampling.arguments import one_each, require_room_for_update
from vectorlm.sampling.packed import pack_finished
from vectorlm.sampling.request_outputs import pack_request_outputs
from vectorlm.sampling.rest import Rest, parts_of
from vectorlm.telemetry.timers import Timer


@dataclass
class Group:
    """The prompts of one `Generate`, on their way."""

    as_request_outputs: bool
    ids: list[str] = field(default_factory=list)
    finished: dict[str, Finished] = field(default_factory=dict)

    @property
    def error(self) -> Exception | None:
        """Why one of its prompts has no answer, so that the group will have none."""
        return next((each.error for each in self.finished.values() if each.error is not None), None)

    @property
    def has_ended(self) -> bool:
        """Whether there is an answer."""
        return len(self.finished) == len(self.ids) or self.error is not None

    @property
    def unfinished(self) -> list[str]:
        """Those of its prompts that are still under way."""
        return [name for name in self.ids if name not in self.finished]


class Sampler:
    """Drives one `Inference`; every method runs between two of its steps."""

    def __init__(self, inference: Inference) -> None:
        """Begin with an engine that holds its checkpoint."""
        self._inference = inference
        self._rest = Rest(inference.drop, inference.restore)
        self._groups: dict[int, Group] = {}
        self._clock = Timer()
        self._update: say.BeginUpdate | None = None
        self._paused_at = 0.0
        self._stale: Exception | None = None
        self._broken: Exception | None = None
        self.lost: list[tuple[int, say.Failed]] = []
        """Answers for requests that an update took with it; whoever sends them empties this."""

    @property
    def busy(self) -> bool:
        """Whether there is a step to take."""
        return self._update is None and bool(self._groups)

    def generate(self, number: int, command: say.Generate) -> None:
        """Queue the prompts of one command; either all of them or none."""
        for obstacle in (self._broken, self._stale):
            if obstacle is not None:
                raise obstacle
        if self._update is not None:
            raise EngineError("an update was begun and never finished: update again before sampling.")
        self._rest.check_sampling()
        params = one_each(command.sampling_params, len(command.prompts))
        group = self._groups[number] = Group(command.as_request_outputs)
        try:
            for index, (prompt, each) in enumerate(zip(command.prompts, params, strict=True)):
                name = f"{number}-{index}"
                try:
                    self._inference.submit(name, prompt, each)
                except VectorLMError:
                    raise
                except Exception as error:
                    raise EngineError(
                        f"prompt {index} cannot be sampled: {type(error).__name__}: {error}"
                    ) from error
                group.ids.append(name)
        except BaseException:
            self.abort(number)
            raise

    def abort(self, number: int) -> None:
        """Forget the prompts of one command; unknown ones are gone already."""
        if group := self._groups.pop(number, None):
            self._inference.cancel(group.unfinished)

    def step(self) -> list[tuple[int, say.Generated | say.Failed]]:
        """Let the engine go on for a moment; return the answers that it completed."""
        with self._clock.span("step"):
            finished = self._inference.poll()
        for each in finished:
            if (group := self._groups.get(int(each.name.partition("-")[0]))) is not None:
                group.finished[each.name] = each
        return [
            (number, self._answer(number)) for number, group in list(self._groups.items()) if group.has_ended
        ]

    def give_up(self, error: Exception) -> list[int]:
        """Forget every request after a step that raised: the engine's own state is unknown from here on."""
        self._broken = EngineError(f"the engine failed in an earlier step and must be built anew: {error}")
        numbers = list(self._groups)
        self._groups.clear()
        return numbers

    def connect(self, command: say.Connect) -> say.Connected:
        """Match the trainer's tensors with the engine's."""
        return say.Connected(self._inference.connect(command.manifest, command.arena_path, command.part))

    def begin_update(self, command: say.BeginUpdate) -> say.Paused:
        """Stand still: the ranks write into memory that the engine computes with."""
        require_room_for_update(len(self._groups), command.in_flight)
        self._rest.begin_update()
        self._paused_at = time.perf_counter()
        self._inference.pause()
        self._update = command
        return say.Paused()

    def finish_update(self, command: say.FinishUpdate) -> say.Updated:
        """Take the new weights over; until an update succeeds after a failed one, refuse to generate."""
        assert self._update is not None, "begin_update comes first"
        recompute = self._update.in_flight == "recompute"
        num_running = len(self._groups)
        try:
            load_s = self._inference.load(command.version, command.checksums, command.swapped, recompute)
        except Exception as error:
            # Nobody knows what weights those under way would go on with.
            self._stale = error
            for number in list(self._groups):
                self.abort(number)
                self.lost.append((number, say.Failed(EngineError(f"a weight update failed: {error}"))))
            raise
        finally:
            self._update = None
            self._inference.resume()
        self._stale = None
        self._rest.finish_update()
        stall_s = time.perf_counter() - self._paused_at if num_running else 0.0
        busy = tuple((start, end) for _, start, end in self._clock.spans)
        self._clock = Timer()
        return say.Updated(load_s, stall_s, busy)

    def sleep(self, command: say.Sleep) -> say.Rested:
        """Give device memory away."""
        parts = parts_of(weights=command.weights, kv_cache=command.kv_cache)
        self._rest.sleep(parts, num_requests=len(self._groups))
        return say.Rested()

    def wake_up(self, command: say.WakeUp) -> say.Rested:
        """Take device memory back."""
        self._rest.wake_up(parts_of(weights=command.weights, kv_cache=command.kv_cache))
        return say.Rested()

    def _answer(self, number: int) -> say.Generated | say.Failed:
        """Return the answer; somebody waits for it, so one that cannot be made is an answer too."""
        group = self._groups.pop(number)
        try:
            if group.error is not None:
                self._inference.cancel(group.unfinished)
                raise group.error
            return say.Generated(
                _pack([group.finished[name] for name in group.ids], group.as_request_outputs)
            )
        except Exception as error:
            return say.Failed(portable(error))


def _pack(finished: Sequence[Finished], as_request_outputs: bool) -> list[np.ndarray]:
    if not as_request_outputs:
        return pack_finished(finished).arrays()
    outputs = [each.raw for each in finished]
    if any(output is None for output in outputs):
        raise EngineError(
            "this inference engine has no vllm.RequestOutput objects: call sample instead of generate."
        )
    for index, output in enumerate(outputs):
        output.request_id = str(index)
    return pack_request_outputs(outputs).arrays()


def portable(error: Exception) -> Exception:
    """Return an error that unpickles in a process without vLLM, with this process's traceback in its text."""
    if isinstance(error, VectorLMError):
        return error
    return EngineError(
        f"{type(error).__name__}: {error}\n\nIn the sampler process:\n{traceback.format_exc()}"
    )
