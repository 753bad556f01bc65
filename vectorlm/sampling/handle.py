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
from vectorlm.ranks.engine_ranks import CallResult, capture
from vectorlm.sampling import messages
from vectorlm.sampling.inline_channel import InlineChannel
from vectorlm.sampling.messages import unpack
from vectorlm.types import POLICY, Completion

if TYPE_CHECKING:
    import numpy as np

    from vectorlm.ranks.engine_ranks import EngineRanks

    Answers = dict[int, np.ndarray]
    """Packed answers, by the index of the chunk in the batch."""

CHUNKS_IN_FLIGHT = 8
"""Number of chunks that fill an engine if several engines share the prompts of a batch."""
LET_GO = (
    "the batch that engine.submit() returned was garbage-collected, so it is cancelled. Keep it until you have read "
    "its result, or until engine.poll() returns it."
)


class WorkQueue:
    """The chunks of a batch that one engine took from the shared queue, and their answers.

    The queue is a counter that all engine ranks increment: a faster engine takes more chunks, without a dispatcher.
    """

    def __init__(
        self,
        channel: messages.Channel,
        draw: Callable[[], int],
        chunks: Sequence[messages.Generate],
        capacity: int,
        silence_s: float,
    ) -> None:
        """Take the first of `chunks`; `draw` returns the next index, `capacity` limits the prompts in flight."""
        self._channel, self._silence_s = channel, silence_s
        self._draw, self._chunks, self._capacity = draw, chunks, capacity
        self._is_drained = False
        self._in_flight: dict[int, int] = {}
        self._answers: Answers = {}
        self._take_more()

    def is_finished(self) -> bool:
        """Return whether nothing is left to take or to wait for."""
        self._take_more()
        return self._is_drained and all(map(self._has_answer, self._in_flight.values()))

    def collect(self, deadline_s: float | None) -> Answers:
        """Wait for all answers; raises what `Channel.answer` raises, and may be called again after a time-out."""
        # After a time-out, an engine that goes on must be able to show it.
        self._channel.advance()
        self._take_more()
        while self._in_flight:
            place, number = next(iter(self._in_flight.items()))
            self._answers[place] = self._channel.answer(number, self._silence_s, "generating", deadline_s)
            del self._in_flight[place]
            self._take_more()
        return self._answers

    def cancel(self) -> bool:
        """Abort the chunks in flight and take no more; return whether any was in flight."""
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
    """A batch in flight, as `SamplingEngine.submit` returns it; its methods are collective."""

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
        """Queue the same prompts on every rank; the result holds the prompts in the range `places`."""
        self.name = name
        """Name of the batch, the same on all ranks."""
        self.adapter = command.adapter
        """The adapter that samples it."""
        self._pid = os.getpid()
        self._places = places
        self._as_request_outputs = command.as_request_outputs
        self._engine_ranks = engine_ranks
        self._collectives = collectives = engine_ranks.collectives
        self._channel = channel
        num_prompts, num_engines = len(command.prompts), len(engine_ranks.ranks)
        # An engine starts with at most 1/num_engines of the prompts; later the faster engine takes more.
        capacity = num_prompts if num_engines == 1 else min(max_num_seqs, -(-num_prompts // num_engines))
        self._chunk_size = capacity if num_engines == 1 else max(1, capacity // CHUNKS_IN_FLIGHT)
        self._queue: WorkQueue | None = None
        self._failure: Exception | None = None
        self._result: tuple[Answers, Exception | None] | None = None
        if num_prompts and channel is not None:
            prompts, params = command.prompts, command.sampling_params
            has_own = isinstance(params, Sequence) and len(params) == num_prompts
            pieces = [
                slice(start, start + self._chunk_size) for start in range(0, num_prompts, self._chunk_size)
            ]
            chunks = [
                replace(command, prompts=prompts[piece], sampling_params=params[piece] if has_own else params)
                for piece in pieces
            ]
            # A single engine needs no counter in the store.
            draw = itertools.count().__next__ if num_engines == 1 else lambda: collectives.ticket(name)
            self._queue, self._failure = capture(
                lambda: WorkQueue(channel, draw, chunks, capacity, silence_s)
            )

    @property
    def is_settled(self) -> bool:
        """Whether every rank has its result, or the batch was cancelled."""
        return self._result is not None

    def done(self) -> bool:
        """Return whether `result` would return without waiting; errors of the engine are raised there."""
        if self._result is None and self._channel is not None:
            self._channel.advance()
        return self._result is not None or all(self._engine_ranks.on_all_ranks("poll", self.is_finished_here))

    def is_finished_here(self) -> bool:
        """Return whether this rank's engine, if any, has finished the batch or failed; not a collective."""
        finished, error = capture(self.look)
        return error is not None or bool(finished)

    def look(self) -> bool:
        """Return whether this rank's engine has finished the batch; raises if it is dead or silent."""
        return self._result is not None or self._queue is None or self._queue.is_finished()

    def result(self, timeout_s: float | None = None) -> list[list[Completion]]:
        """Wait for the completions of each prompt, in the order of the prompts; a second call returns the same.

        Args:
            timeout_s: Longest wait, in seconds; no limit while the engine shows life when omitted.

        Raises:
            EngineTimeout: The requests did not finish within `timeout_s`. They continue; you may call `result` again.
            EngineError: The engine raised (the text holds its traceback), died, or the requests were cancelled.
        """
        if self._result is None:
            self._collectives.require_open()
            late = exchange_results([self], None if timeout_s is None else time.monotonic() + timeout_s)
            if late is not None:
                raise late
        assert self._result is not None
        answers, error = self._result
        if error is not None:
            raise error
        first, last = self._places.start, self._places.stop
        found: list[Any] = []
        for place, packed in sorted(answers.items()):
            start = place * self._chunk_size
            if start < last and start + self._chunk_size > first:
                found += unpack(packed, max(first - start, 0), min(last - start, self._chunk_size))
        if self._as_request_outputs:
            for index, output in enumerate(found, start=first):
                output.request_id = str(index)
        return found

    def complete(self) -> list[Any]:
        """Return the result; abort the requests if the caller stops waiting, because only the caller can read it."""
        try:
            return self.result()
        except BaseException:
            self._cancel_here()
            raise

    def cancel(self) -> None:
        """Cancel the requests; `result` then raises `EngineError`. Does nothing after the result was read."""
        if self._result is None:
            self._cancel_here()
            self._result = ({}, EngineError("these requests were cancelled."))

    def __del__(self) -> None:
        # Nobody can read the answers any more, so the engine must not sample them, nor the channel keep them.
        try:
            if self._cancel_here() and self._result is None and self._pid == os.getpid():
                self._collectives.require_open()
                warnings.warn(LET_GO, RuntimeWarning, stacklevel=2)
        except Exception:  # Modules may be gone when the interpreter ends.
            pass

    def _cancel_here(self) -> bool:
        """Cancel on this rank; return whether anything was in flight here."""
        return self._queue is not None and self._queue.cancel()

    def _collect(self, deadline_s: float | None) -> Answers:
        if self._failure is not None:
            raise self._failure
        return {} if self._queue is None else self._queue.collect(deadline_s)


def exchange_results(batches: Sequence[BatchHandle], deadline_s: float | None = None) -> EngineTimeout | None:
    """Send the answers of every engine to every rank, one message per engine.

    Returns:
        The error of a batch without a result: `deadline_s` has passed, or an engine is silent. The batch continues.
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
            batch._result = answers, error
            if len(engine_ranks.ranks) > 1:
                # Every engine has drawn its last chunk before it gave its answers.
                collectives.forget_tickets(batch.name)
    return late


Hear = Callable[[Completion], None]
"""A function that receives the tokens sampled since its last call."""


@dataclass(frozen=True, eq=False)
class _Request:
    command: messages.Generate
    hear: Hear | None
    future: Future[list[Completion]] = field(default_factory=Future)


class LocalRequests:
    """Requests of one rank to its own engine, made by a thread next to the training loop; no other rank takes part.

    The requests between two calls of `flush` reach the engine as one message, so it starts them together. An engine on
    the inline channel gets them in `advance`, in the thread that makes every other call to it.
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
        """Number of requests that the engine has received and not answered."""
        return len(self._sent)

    def ask(
        self,
        prompt: Sequence[int],
        sampling_params: Any,
        hear: Hear | None = None,
        adapter: str = POLICY,
    ) -> Future[list[Completion]]:
        """Request the completions of one prompt; `flush` sends the request, and the future raises the engine's error.

        `hear` receives the tokens of a single completion as they are sampled, in the thread that receives answers.
        """
        command = messages.Generate([prompt], [sampling_params], False, hear is not None, adapter)
        request = _Request(command, hear)
        with self._lock:
            self._new.append(request)
        return request.future

    def flush(self) -> None:
        """Send the new requests, except during an update."""
        with self._lock:
            if not self.is_inline:
                self._send()

    def take_back(self, future: Future[list[Completion]]) -> None:
        """Cancel a request, unless it was answered."""
        with self._lock:
            self._new = [request for request in self._new if request.future is not future]
            numbers = [number for number, request in self._sent.items() if request.future is future]
            for number in numbers:
                del self._sent[number]
            self._taken_back += numbers
        self.flush()

    def forget(self) -> None:
        """Send the cancellations to the engine, in the thread that makes every other call to it."""
        with self._lock:
            while self._taken_back:
                self._channel.cancel(self._taken_back.pop())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay new requests until the end of the block, which updates the weights."""
        with self._lock:
            self.forget()
            self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self.flush()

    def advance(self) -> bool:
        """Raise if the engine is dead or silent; let an inline engine sample, and return whether it did."""
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
            numbers = self._channel.ask([request.command for request in new], self._answer)
        except EngineError as error:
            for request in new:
                _settle(request.future, (None, error))
        else:
            self._sent |= dict(zip(numbers, new, strict=True))

    def _answer(self, number: int, message: CallResult | messages.Part) -> None:
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


def _settle(future: Future[list[Completion]], result: CallResult) -> None:
    """Set the result of a request, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    value, error = result
    if error is None:
        # The thread that receives answers must survive an unreadable one.
        value, error = capture(lambda: unpack(result[0])[0])
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
