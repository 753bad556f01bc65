"""Requests in flight: batches that all ranks submitted, and single requests of one rank."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vectorlm.errors import EngineError, EngineTimeout
from vectorlm.ranks.engine_ranks import capture
from vectorlm.sampling import messages
from vectorlm.sampling.inline_channel import InlineChannel
from vectorlm.sampling.messages import unpack
from vectorlm.types import Completion

if TYPE_CHECKING:
    import numpy as np

    from vectorlm.ranks.engine_ranks import EngineRanks

    Answers = dict[int, np.ndarray]
    """Packed answers, by the chunk's place in the batch."""

CHUNKS_IN_FLIGHT = 8
"""Chunks that fill an engine where several engines compete for prompts."""
LET_GO = (
    "nobody keeps what engine.submit() returned: the batch is cancelled. Keep it until its result is read, or until "
    "engine.poll() returns it."
)


class WorkQueue:
    """The chunks of a batch that one engine took from the common queue, and their answers.

    The queue is a counter that all engine ranks draw from: a faster engine takes more, and nobody dispatches.
    """

    def __init__(
        self,
        channel: messages.Channel,
        draw: Callable[[], int],
        chunks: Sequence[messages.Generate],
        capacity: int,
        silence_s: float,
    ) -> None:
        """Take the first of `chunks`; `draw` returns the next chunk's place, `capacity` prompts fit into the engine."""
        self._channel = channel
        self._draw = draw
        self._chunks = chunks
        self._capacity = capacity
        self._silence_s = silence_s
        self._is_drained = False
        self._in_flight: dict[int, int] = {}
        self._answers: Answers = {}
        self._take_more()

    def is_finished(self) -> bool:
        """Return whether nothing is left to take or to wait for."""
        self._take_more()
        return self._is_drained and all(map(self._has_answer, self._in_flight.values()))

    def collect(self, deadline_s: float | None) -> Answers:
        """Wait for every answer; raises as `Channel.answer` does, and may be called again after a time-out."""
        self._take_more()
        while self._in_flight:
            place, number = next(iter(self._in_flight.items()))
            self._answers[place] = self._channel.answer(number, self._silence_s, "generating", deadline_s)
            del self._in_flight[place]
            self._take_more()
        return self._answers

    def cancel(self) -> bool:
        """Abort what is in flight, and take nothing more; return whether anything was."""
        self._is_drained = True
        numbers = list(self._in_flight.values())
        self._in_flight.clear()
        for number in numbers:
            self._channel.cancel(number)
        return bool(numbers)

    def _take_more(self) -> None:
        while not self._is_drained and self._num_in_flight() < self._capacity:
            place = self._draw()
            if place >= len(self._chunks):
                self._is_drained = True
                return
            self._in_flight[place] = self._channel.send(self._chunks[place])

    def _num_in_flight(self) -> int:
        waiting = (place for place, number in self._in_flight.items() if not self._has_answer(number))
        return sum(len(self._chunks[place].prompts) for place in waiting)

    def _has_answer(self, number: int) -> bool:
        return self._channel.has_answer(number, self._silence_s)


class BatchHandle:
    """The handle that `SamplingEngine.submit` returns; its calls are collective."""

    def __init__(
        self,
        name: str,
        command: messages.Generate,
        *,
        places: range,
        engine_ranks: EngineRanks,
        channel: messages.Channel | None,
        max_num_seqs: int,
        silence_s: float,
    ) -> None:
        """Queue the same prompts on every rank; the result holds those at `places`, without a gap."""
        self.name = name
        """The same on all ranks."""
        self._pid = os.getpid()
        self._places = places
        self._as_request_outputs = command.as_request_outputs
        self._engine_ranks = engine_ranks
        self._collectives = collectives = engine_ranks.collectives
        self._channel = channel
        num_prompts, num_engines = len(command.prompts), len(engine_ranks.ranks)
        # An engine starts with 1/num_engines of the prompts at most; beyond its capacity the faster one takes more.
        capacity = num_prompts if num_engines == 1 else min(max_num_seqs, -(-num_prompts // num_engines))
        self._chunk_size = capacity if num_engines == 1 else max(1, capacity // CHUNKS_IN_FLIGHT)
        self._queue: WorkQueue | None = None
        self._failure: Exception | None = None
        self._result: tuple[Answers, Exception | None] | None = None
        if not num_prompts:
            self._result = ({}, None)
        elif channel is not None:
            chunks = _split(command, self._chunk_size)
            # A lone engine need not ask what others have drawn.
            draw = itertools.count().__next__ if num_engines == 1 else lambda: collectives.ticket(name)
            self._queue, self._failure = capture(
                lambda: WorkQueue(channel, draw, chunks, capacity, silence_s)
            )

    @property
    def is_settled(self) -> bool:
        """Whether every rank knows its result, or that it was cancelled."""
        return self._result is not None

    def done(self) -> bool:
        """Return whether `result` would not wait; `result` raises the errors of the engine."""
        if self._result is None and self._channel is not None:
            self._channel.advance()
        return self._result is not None or all(self._engine_ranks.on_all_ranks("poll", self.is_finished_here))

    def is_finished_here(self) -> bool:
        """Return whether this rank's engine, if any, has nothing left to do, or failed; not a collective."""
        finished, error = capture(self.look)
        return error is not None or bool(finished)

    def look(self) -> bool:
        """Return whether this rank's engine has nothing left to do; raises where it is dead or silent."""
        return self._result is not None or self._queue is None or self._queue.is_finished()

    def result(self, timeout_s: float | None = None) -> list[list[Completion]]:
        """Wait for the completions of each prompt, in the order of the prompts; a second call returns the same.

        Args:
            timeout_s: Longest wait, in seconds; no limit while the engine shows life when omitted.

        Raises:
            EngineTimeout: They were not finished within `timeout_s`; they go on, and `result` may be called again.
            EngineError: The engine raised (the text holds its traceback), died, or the requests were cancelled.
        """
        first, last = self._places.start, self._places.stop
        found: list[Any] = []
        for place, packed in sorted(self._all_answers(timeout_s).items()):
            start = place * self._chunk_size
            if start < last and start + self._chunk_size > first:
                found += unpack(packed, max(first - start, 0), min(last - start, self._chunk_size))
        if self._as_request_outputs:
            for index, output in enumerate(found, start=first):
                output.request_id = str(index)
        return found

    def complete(self) -> list[Any]:
        """Return the result; abort the requests if the caller stops waiting: nobody else could ask for it."""
        try:
            return self.result()
        except BaseException:
            self._cancel_here()
            raise

    def cancel(self) -> None:
        """Take the requests back; `result` then raises `EngineError`. Does nothing once there is a result."""
        if self._result is None:
            self._cancel_here()
            self._result = ({}, EngineError("these requests were cancelled."))

    def __del__(self) -> None:
        # Nobody can ask for the answers any more: the engine need not sample them, nor the channel keep them.
        try:
            if self._cancel_here() and self._result is None and self._pid == os.getpid():
                self._collectives.require_open()
                warnings.warn(LET_GO, RuntimeWarning, stacklevel=2)
        except Exception:  # Whatever this needs may be gone when the interpreter ends.
            pass

    def _cancel_here(self) -> bool:
        """Return whether anything was in flight here."""
        return self._queue is not None and self._queue.cancel()

    def _all_answers(self, timeout_s: float | None) -> Answers:
        if self._result is None:
            self._collectives.require_open()
            late = exchange_results([self], None if timeout_s is None else time.monotonic() + timeout_s)
            if late is not None:
                raise late
        assert self._result is not None
        answers, error = self._result
        if error is not None:
            raise error
        return answers

    def _settle(self, answers: Answers, error: Exception | None) -> None:
        self._result = answers, error
        if len(self._engine_ranks.ranks) > 1:
            # Every engine has drawn its last chunk before it gave its answers.
            self._collectives.forget_tickets(self.name)

    def _collect(self, deadline_s: float | None) -> Answers:
        if self._failure is not None:
            raise self._failure
        return {} if self._queue is None else self._queue.collect(deadline_s)


def exchange_results(batches: Sequence[BatchHandle], deadline_s: float | None = None) -> EngineTimeout | None:
    """Give the answers of every engine to every rank, in one message of each engine.

    Returns:
        Why a batch has no result yet: `deadline_s` has passed, or an engine is silent. It goes on.
    """
    if not batches:
        return None
    engine_ranks, collectives = batches[0]._engine_ranks, batches[0]._collectives
    mine = [capture(functools.partial(batch._collect, deadline_s)) for batch in batches]
    places = [(list(answers or ()), error) for answers, error in mine]
    flat = [packed for answers, _ in mine for packed in (answers or {}).values()]
    found: list[tuple[Answers, list[Exception]]] = [({}, []) for _ in batches]
    for rank in engine_ranks.ranks:
        notes, shared = collectives.broadcast_object("sample", places, flat, root=rank)
        rest = iter(shared)
        for (answers, errors), (taken, error) in zip(found, notes, strict=True):
            answers |= {place: next(rest) for place in taken}
            errors += [] if error is None else [error]
    late = None
    for batch, (answers, errors) in zip(batches, found, strict=True):
        # An error that ends the batch comes before a time-out that does not.
        errors.sort(key=lambda error: type(error) is EngineTimeout)
        error = errors[0] if errors else None
        if type(error) is EngineTimeout:
            late = error
        else:
            batch._settle(answers, error)
    return late


def _split(command: messages.Generate, size: int) -> list[messages.Generate]:
    """Split the prompts of a command, and their sampling parameters where each prompt has its own."""
    prompts, params = command.prompts, command.sampling_params
    has_own = isinstance(params, Sequence) and len(params) == len(prompts)
    return [
        replace(
            command,
            prompts=prompts[start : start + size],
            sampling_params=params[start : start + size] if has_own else params,
        )
        for start in range(0, len(prompts), size)
    ]


Hear = Callable[[Completion], None]
"""Gets what was sampled since it was called last."""


@dataclass(frozen=True, eq=False)
class _Request:
    command: messages.Generate
    hear: Hear | None
    future: Future[list[Completion]] = field(default_factory=Future)


class LocalRequests:
    """Requests of one rank to its own engine; no other rank takes part.

    What is asked between two calls of `flush` reaches the engine as one message: it never begins with a part of that.
    An engine on the inline channel is not asked before `advance`, in the thread that makes every other call to it.
    """

    def __init__(self, channel: messages.Channel, silence_s: float) -> None:
        self._channel, self._silence_s = channel, silence_s
        self.is_inline = isinstance(channel, InlineChannel)
        """Whether the engine samples in this process, inside `advance`."""
        self._lock = threading.RLock()
        self._is_held = False
        self._new: list[_Request] = []
        self._sent: dict[int, _Request] = {}
        self._taken_back: list[int] = []

    @property
    def num_in_flight(self) -> int:
        """Requests that the engine has and has not answered."""
        return len(self._sent)

    def ask(
        self, prompt: Sequence[int], sampling_params: Any, hear: Hear | None = None
    ) -> Future[list[Completion]]:
        """Ask for the completions of one prompt, from `flush` on; an error is the engine's.

        Of one completion, `hear` gets what is sampled as it is sampled, in the thread that receives answers.
        """
        command = messages.Generate([prompt], [sampling_params], False, is_streamed=hear is not None)
        request = _Request(command, hear)
        with self._lock:
            self._new.append(request)
        return request.future

    def flush(self) -> None:
        """Send what was asked, except during an update."""
        with self._lock:
            if not self.is_inline:
                self._send()

    def take_back(self, future: Future[list[Completion]]) -> None:
        """Forget a request; one that was answered stays as it is."""
        with self._lock:
            self._new = [each for each in self._new if each.future is not future]
            numbers = [number for number, each in self._sent.items() if each.future is future]
            for number in numbers:
                del self._sent[number]
            self._taken_back += numbers
        self.flush()

    def forget(self) -> None:
        """Tell the engine what was taken back, in the thread that makes every other call to it."""
        with self._lock:
            while self._taken_back:
                self._channel.cancel(self._taken_back.pop())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Send nothing new inside the block, an update; what is asked meanwhile follows it."""
        with self._lock:
            self.forget()
            self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self.flush()

    def advance(self) -> bool:
        """Raise where the engine is dead or silent; let an inline engine sample, and return whether it did."""
        if self.is_inline:
            with self._lock:
                self._send()
            self._channel.advance()
        oldest = next(iter(self._sent.copy()), None)
        if oldest is not None:
            self._channel.has_answer(oldest, self._silence_s)
        return self.is_inline and oldest is not None

    def _send(self) -> None:
        if self._is_held:
            return
        self.forget()
        new, self._new = self._new, []
        if not new:
            return
        try:
            # No answer is taken before its number is known: the lock is held.
            numbers = self._channel.ask([each.command for each in new], self._answer)
        except EngineError as error:
            for each in new:
                _settle(each.future, messages.Failed(error))
        else:
            self._sent |= dict(zip(numbers, new, strict=True))

    def _answer(self, number: int, message: messages.Answer | messages.Failed | messages.Part) -> None:
        """Take an answer or a part of one, in the thread that received it."""
        with self._lock:
            if isinstance(message, messages.Part):
                asked = self._sent.get(number)
                if asked is not None and asked.hear is not None:
                    asked.hear(message.completion)
                return
            asked = self._sent.pop(number, None)
        if asked is not None:
            _settle(asked.future, message)


def _settle(future: Future[list[Completion]], message: messages.Answer | messages.Failed) -> None:
    """Give a request its answer, unless whoever asked has gone."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(message, messages.Failed):
        future.set_exception(message.error)
    else:
        future.set_result(unpack(message.value)[0])
