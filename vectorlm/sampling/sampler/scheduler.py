"""The order of calls to a backend, and the rules for commands, the same for all backends and channels."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from vectorlm.data.images import pictures_of
from vectorlm.errors import EngineError, HandleRefused, UnknownAdapter, VectorLMError
from vectorlm.plugin import is_plugin, load_plugin
from vectorlm.ranks.engine_ranks import CallResult, capture, portable
from vectorlm.sampling import messages
from vectorlm.sampling.arguments import one_each
from vectorlm.sampling.contract import BACKENDS, AnswerRules, Backend, RequestOutput
from vectorlm.sampling.messages import pack
from vectorlm.sampling.weights.plan import BASE
from vectorlm.settings import nearest
from vectorlm.types import POLICY, InFlight

BREAK_S = 0.01
"""Steps with a shorter break between them count as one busy span."""

PARTS = ("weights", "kv_cache")
"""The parts of an engine that can sleep, by vLLM's names."""

Parts = frozenset[str]
Numbered = tuple[int, CallResult]
"""The result of the command with this number."""
SAMPLER = "the sampler process"
NumberedPart = tuple[int, messages.Part]


def backend_class(inference: str) -> Any:
    """Return the class of the backend of this name; raises `EngineError` or `ConfigError` if there is none."""
    name = BACKENDS.get(inference, inference)
    if not is_plugin(name):
        raise EngineError(
            f"inference={inference!r} is not known: it must be one of {', '.join(BACKENDS)}, or a class as "
            f"module:Class or file.py:Class. {nearest(inference, BACKENDS)}".rstrip()
        )
    return load_plugin(name)


def open_backend(start: messages.Start) -> Backend:
    """Build the backend that `start` names; raises as `backend_class`, and `EngineError` for wrong arguments."""
    make = backend_class(start.inference)
    try:
        inspect.signature(make).bind(start.model, receiver=start.receiver, **start.engine_args)
    except TypeError as error:
        raise EngineError(f"inference={start.inference!r} cannot be built: {error}.") from error
    backend: Backend = make(start.model, receiver=start.receiver, **start.engine_args)
    return backend


def ready(backend: Backend, load_s: float) -> messages.Ready:
    """Return the description of a backend for the ranks; it was built in `load_s` seconds."""
    return messages.Ready(
        backend.receiver,
        load_s,
        backend.max_num_seqs,
        getattr(backend, "transports", ("push",)),
        getattr(backend, "tokenizer", None),
        getattr(backend, "warning", ""),
        getattr(backend, "runner", ""),
        getattr(backend, "keeps_base", False),
    )


def require_room_for_update(num_in_flight: int, in_flight: InFlight) -> None:
    """Raise EngineError for requests in flight that the caller of `update` did not expect."""
    if num_in_flight and in_flight == "refuse":
        raise EngineError(
            f"{num_in_flight} requests are in flight: wait for them, take them back with handle.cancel(), or pass "
            "update(in_flight='keep'), 'recompute' or 'drain'."
        )


def require_room_for_sleep(num_in_flight: int) -> None:
    """Raise EngineError for requests that sleeping would lose."""
    if num_in_flight:
        raise EngineError(
            f"the engine cannot sleep while {num_in_flight} requests are running: wait for their result, or "
            "cancel them, first."
        )


class SleepState:
    """The rules for sleeping, waking, updating and sampling, on CPU and CUDA alike.

    A sleeping part frees its device memory and loses its content: the KV cache comes back empty, and the weights are
    garbage until the next update.
    """

    def __init__(
        self, free: Callable[[Parts, Parts], None], take_back: Callable[[Parts], Sequence[str] | None]
    ) -> None:
        """Take `Backend.sleep` and `Backend.wake_up`."""
        self._free, self._take_back = free, take_back
        self._weights_are_lost = False
        self._restored: list[str] = []
        self.asleep: Parts = frozenset()
        """The parts that sleep."""

    def sleep(self, parts: Parts, num_requests: int) -> None:
        """Put the awake `parts` to sleep; raises while requests run."""
        require_room_for_sleep(num_requests)
        if not (new := parts - self.asleep):
            return
        before = self.asleep, self._weights_are_lost
        # Set before the call: if it fails half way, what is left must not be sampled from.
        self.asleep |= new
        self._weights_are_lost |= "weights" in new
        try:
            self._free(new, before[0])
        except EngineError:
            self.asleep, self._weights_are_lost = before
            raise

    def wake_up(self, parts: Parts) -> None:
        """Wake the sleeping `parts`; after an error they still sleep, and you may call again."""
        if due := parts & self.asleep:
            self._restored += self._take_back(due) or ()
            self.asleep -= due

    def take_restored(self) -> list[str]:
        """Return the names of restored tensors that were not returned before."""
        restored, self._restored = self._restored, []
        return restored

    def finish_update(self) -> None:
        """Note that the policy's weights were loaded."""
        self._weights_are_lost = False

    def check_sampling(self) -> None:
        """Raise `EngineError` if a part sleeps or the weights are lost; the text says what to call."""
        if self.asleep:
            parts = sorted(self.asleep, key=PARTS.index)
            calls = f"wake_up({', '.join(f'{part}=True' for part in parts)})"
            if self._weights_are_lost:
                calls += " and update()"
            raise EngineError(f"the engine is asleep ({' and '.join(parts)}): call {calls} before sampling.")
        if self._weights_are_lost:
            raise EngineError("the engine lost its weights while it slept: call update() before sampling.")


@dataclass
class _Batch:
    """The prompts of one `Generate`, in flight."""

    command: messages.Generate
    sampling_params: list[Any]
    num_loads: int
    """Number of loads of weights before it was submitted."""
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)
    """By name, in the order of the prompts; None for requests in flight."""
    error: Exception | None = None
    """The first error, which ends the whole batch."""

    @property
    def has_ended(self) -> bool:
        return self.error is not None or None not in self.outputs.values()

    @property
    def unfinished(self) -> list[str]:
        return [name for name, output in self.outputs.items() if output is None]


class Scheduler:
    """The driver of one `Backend`: it carries out commands between two steps, and returns their results."""

    def __init__(self, backend: Backend, model: str | None = None) -> None:
        """Drive `backend`, which was built for the folder `model`."""
        self._backend = backend
        self._rules = AnswerRules(backend, model)
        self._sleep_state = SleepState(backend.sleep, backend.wake_up)
        self._batches: dict[int, _Batch] = {}
        self._newest = -1
        """The number of the last `Generate`."""
        self._busy: list[tuple[float, float]] = []
        self.has_progressed = True
        """Whether the backend has sampled or answered since somebody set this to False."""
        self._progress: int | None = None
        self._update: messages.BeginUpdate | None = None
        self._paused_at = 0.0
        self._obstacle: Exception | None = None
        """The error that blocks sampling: of the last update, or of a step."""
        self._is_broken = False
        self._failed_adapter = POLICY
        """The adapter of the last update that failed."""
        self._leaving: set[str] = set()
        """Adapters that are removed once their last request has ended."""
        self._lost: list[Numbered] = []

    @property
    def busy(self) -> bool:
        """Whether there is a step to take."""
        return self._update is None and bool(self._batches)

    def carry_out(self, number: int, command: Any) -> list[Numbered]:
        """Carry out one command; return its result, if it has one already, and the errors of requests that it ended."""
        if isinstance(command, messages.Abort):
            self._abort(command.generate)
            return []
        result = capture(lambda: self._value_of(number, command), SAMPLER)
        if isinstance(command, messages.Generate) and result[1] is None:
            return []
        lost, self._lost = self._lost, []
        return [*lost, (number, result)]

    def _value_of(self, number: int, command: Any) -> Any:
        backend: Any = self._backend
        match command:
            case messages.Generate():
                self._generate(number, command)
            case messages.Connect():
                # A recorded loader may write to the weights: zeros behind the last row of a vocabulary, for example.
                self._sleep_state.wake_up(frozenset({"weights"}))
                # A backend without rounds has no such argument.
                more = {} if command.arena_bytes is None else {"arena_bytes": command.arena_bytes}
                return backend.connect(command.manifest, command.arena_path, command.weight_set, **more)
            case messages.OpenHandles():
                backend.open_handles(command.weight_set, command.exports)
            case messages.LendBase():
                if not hasattr(backend, "lend"):
                    raise HandleRefused(f"the backend {type(backend).__name__} lends no weights.")
                return backend.lend(command.checksums)
            case messages.CopyRound():
                assert self._update is not None, "begin_update comes first"
                backend.copy_round(command.rounds)
            case messages.FinishUpdate():
                return self._finish_update(command)
            case messages.BeginUpdate():
                self._begin_update(command)
                return self._sleep_state.take_restored()
            case messages.RemoveAdapter():
                return self._remove_adapter(command.adapter)
            case messages.TakeAccepted():
                return backend.take_accepted()
            case messages.RequireWhole():
                self._require_whole()
            case messages.Sleep():
                self._sleep_state.sleep(_parts_of(command), num_requests=len(self._batches))
            case messages.WakeUp():
                self._sleep_state.wake_up(_parts_of(command))
                return self._sleep_state.take_restored()
            case _:
                raise EngineError(f"unknown command of the sampler process: {type(command).__name__}.")
        return None

    def step(self) -> Sequence[Numbered | NumberedPart]:
        """Let the backend sample for a moment; return parts of answers, then the results of complete batches."""
        start = time.perf_counter()
        try:
            outputs = self._backend.poll()
        except Exception as error:
            return self._give_up(error)
        finally:
            end = time.perf_counter()
            if self._busy and start - self._busy[-1][1] < BREAK_S:
                start = self._busy.pop()[0]
            self._busy.append((start, end))
        progress = getattr(self._backend, "progress", None)
        if outputs or progress != self._progress:
            self.has_progressed, self._progress = True, progress
        parts: list[NumberedPart] = []
        for output in outputs:
            if not output.is_part:
                self._take(output)
            elif (number := int(output.name.partition("-")[0])) in self._batches:
                parts.append((number, messages.Part(output.completions[0])))
        ended = [number for number, batch in self._batches.items() if batch.has_ended]
        results = [capture(partial(self._answer, self._batches.pop(number)), SAMPLER) for number in ended]
        return [*parts, *zip(ended, results, strict=True)]

    def close(self) -> None:
        """End the backend."""
        self._backend.close()

    def _require_whole(self) -> None:
        """Raise if the backend failed in an earlier step."""
        if self._is_broken and self._obstacle is not None:
            raise self._obstacle

    def _take(self, output: RequestOutput) -> None:
        """Store an output in its batch; drop it if the batch was cancelled or has ended."""
        number, _, index = output.name.partition("-")
        batch = self._batches.get(int(number)) if number.isdecimal() else None
        if batch is not None and output.name in batch.outputs:
            if batch.outputs[output.name] is not None:
                batch.error = batch.error or self._rules.error(int(index), "twice")
            batch.outputs[output.name] = output
            batch.error = batch.error or output.error
        elif batch is not None or not number.isdecimal() or int(number) > self._newest:
            for running in self._batches.values():
                running.error = running.error or self._rules.unknown(output.name)

    def _generate(self, number: int, command: messages.Generate) -> None:
        """Queue the prompts of one command: all of them, or none if one is invalid."""
        if self._obstacle is not None:
            raise self._obstacle
        if self._update is not None:
            raise EngineError(
                "an update() is in progress or did not finish: wait for it, or call update() again, before sampling."
            )
        self._sleep_state.check_sampling()
        self._require_adapter(command.adapter)
        params = one_each(command.sampling_params, len(command.prompts))
        num_loads = len(self._rules.loaded[command.adapter])
        batch = self._batches[number] = _Batch(command, params, num_loads)
        self._newest = number
        submit: Any = self._backend.submit
        if command.as_request_outputs:
            submit = getattr(self._backend, "submit_raw", submit)
        elif command.is_streamed:
            submit = getattr(self._backend, "submit_streamed", submit)
        if command.adapter != POLICY:
            submit = partial(submit, adapter=command.adapter)
        try:
            for index, (prompt, own_params) in enumerate(zip(command.prompts, params, strict=True)):
                name = f"{number}-{index}"
                self._rules.check_prompt(index, prompt)
                if pictures_of(prompt) and not getattr(self._backend, "takes_images", False):
                    raise EngineError(f"prompt {index} has images, which this engine does not take.")
                try:
                    submit(name, prompt, own_params)
                except VectorLMError:
                    raise
                except Exception as error:
                    raise EngineError(
                        f"prompt {index} cannot be sampled: {type(error).__name__}: {error}"
                    ) from error
                batch.outputs[name] = None
        except BaseException:
            self._abort(number)
            raise

    def _require_adapter(self, name: str) -> None:
        known = getattr(self._backend, "adapters", {POLICY: 0}).keys() - self._leaving
        if name not in known:
            raise UnknownAdapter(
                f"adapter={name!r}: the engine does not hold this adapter, only {', '.join(sorted(known))}. Send it "
                "with update(model, step, name=…) to an engine with LoRA layers."
            )

    def _remove_adapter(self, name: str) -> bool:
        """Free the slot of an adapter; return False while requests use it."""
        if name in (POLICY, BASE):
            raise EngineError(f"adapter={name!r} cannot be removed. Name another adapter.")
        if name not in self._leaving:
            self._require_adapter(name)
            self._leaving.add(name)
        if any(batch.command.adapter == name for batch in self._batches.values()):
            return False
        backend: Any = self._backend
        backend.remove_adapter(name)
        self._leaving.remove(name)
        del self._rules.loaded[name]
        return True

    def _abort(self, number: int) -> None:
        if batch := self._batches.pop(number, None):
            self._backend.cancel(batch.unfinished)

    def _give_up(self, error: Exception) -> list[Numbered]:
        """Fail every request after a step that raised: the state of the backend is unknown."""
        self._is_broken = True
        self._obstacle = EngineError(
            f"the engine failed in an earlier step and must be started again: {error}"
        )
        failed: list[Numbered] = [(number, (None, portable(error, SAMPLER))) for number in self._batches]
        self._batches.clear()
        return failed

    def _begin_update(self, command: messages.BeginUpdate) -> None:
        """Pause: the ranks are about to write into memory that the engine computes with."""
        self._require_whole()
        require_room_for_update(len(self._batches), command.in_flight)
        backend: Any = self._backend
        if command.new_slot_for is not None:
            backend.require_slot(command.new_slot_for)
        self._sleep_state.wake_up(frozenset({"weights"}))
        self._paused_at = time.perf_counter()
        self._backend.pause()
        self._update = command

    def _finish_update(self, command: messages.FinishUpdate) -> messages.Updated:
        """Load the new weights; after a failed update nothing is sampled until one succeeds."""
        assert self._update is not None, "begin_update comes first"
        recompute = self._update.in_flight == "recompute"
        num_running = len(self._batches)
        backend: Any = self._backend
        more = {} if command.adapter == POLICY else {"adapter": command.adapter}
        try:
            load_s: float = backend.load(
                command.version, command.checksums, command.weight_sets, recompute, **more
            )
            if command.may_hold_nan and hasattr(self._backend, "expect_nan"):
                self._backend.expect_nan()
        except BaseException as error:
            self._fail_update(error, command.adapter)
            raise
        finally:
            self._update = None
            self._backend.resume()
        # After a failed update the next one sends the base again, but only its own adapter's factors.
        if not self._is_broken and (command.adapter == POLICY or self._failed_adapter != POLICY):
            self._obstacle = None
        if command.adapter == POLICY:
            self._sleep_state.finish_update()
        self._rules.note_load(command.version, command.adapter, command.weight_sets)
        # A removal may have been interrupted while it waited for requests.
        self._leaving.discard(command.adapter)
        stall_s = time.perf_counter() - self._paused_at if num_running else 0.0
        busy, self._busy = tuple(self._busy), []
        return messages.Updated(load_s, stall_s, busy)

    def _fail_update(self, error: BaseException, adapter: str) -> None:
        """Fail the requests in flight: the weights that they would continue with are unknown."""
        if self._obstacle is None or adapter == POLICY:
            self._failed_adapter = adapter
        if not self._is_broken:
            interrupted = EngineError("an update() was interrupted: call update() again before sampling.")
            self._obstacle = error if isinstance(error, Exception) else interrupted
        for number in list(self._batches):
            self._abort(number)
            self._lost.append((number, (None, EngineError(f"a weight update failed: {error}"))))

    def _answer(self, batch: _Batch) -> np.ndarray:
        if batch.error is not None:
            self._backend.cancel(batch.unfinished)
            raise batch.error
        outputs = [output for output in batch.outputs.values() if output is not None]
        adapter = batch.command.adapter
        self._rules.check(batch.command.prompts, batch.sampling_params, outputs, batch.num_loads, adapter)
        return pack(outputs, batch.command.as_request_outputs)


def _parts_of(command: messages.Sleep | messages.WakeUp) -> Parts:
    return frozenset(part for part in PARTS if getattr(command, part))
