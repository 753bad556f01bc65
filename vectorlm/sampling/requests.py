"""The requests under way in an engine that rank 0 steps by itself."""

from __future__ import annotations

import pickle
import time
from typing import Any, Protocol

import numpy as np

from vectorlm.errors import EngineError, EngineTimeout
from vectorlm.ranks.meeting import Meeting
from vectorlm.sampling.hosts import first_error_or, outcome_of
from vectorlm.types import Completion

Answers = list[list[Completion]]


class Work(Protocol):
    """One batch of prompts, on rank 0."""

    @property
    def is_finished(self) -> bool:
        """Whether `answers` may be called."""
        ...

    def step(self) -> None:
        """Do the next part of the work, a second's worth at most."""
        ...

    def recompute(self) -> None:
        """Compute anew, before the next step, what was computed with weights that have gone."""
        ...

    def answers(self) -> Answers:
        """Return the completions of each prompt."""
        ...


class Requests:
    """Batches that are answered in the order of their submission, whenever somebody asks for one.

    There is no thread: the work is done inside `Request.done`, `Request.result` and `poll`, on rank 0, so it never
    runs beside the trainer and the order of everything is the order of the calls.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._waiting: list[Request] = []
        self._unreported: dict[int, Request] = {}
        self._count = 0

    @property
    def num_under_way(self) -> int:
        """Batches that are not finished; known on rank 0 only, 0 elsewhere."""
        return len(self._waiting)

    def add(self, work: Work | None) -> Request:
        """Queue a batch; rank 0 brings its work, the other ranks None."""
        self._count += 1
        request = Request(self, self._meeting, self._count, work)
        self._unreported[request.number] = request
        if work is not None:
            self._waiting.append(request)
        return request

    def step(self) -> None:
        """Do a part of the oldest batch's work; an error ends that batch and no other."""
        while self._waiting and self._waiting[0].has_ended:
            self._waiting.pop(0)
        if self._waiting:
            self._waiting[0].step()
        self._waiting = [request for request in self._waiting if not request.has_ended]
        self._meeting.show_life()

    def poll(self) -> list[Request]:
        """Do a part of the work; return, on every rank, the batches that nobody has been told of yet."""
        self.step()
        ended = [number for number, request in self._unreported.items() if request.has_ended]
        found = self._meeting.share("poll", ended)[0]
        return [self._unreported.pop(number) for number in found]

    def finish(self) -> None:
        """Do all the work there is, on rank 0."""
        while self._waiting:
            self.step()

    def recompute(self) -> None:
        """Have every batch compute its cache anew, on rank 0."""
        for request in self._waiting:
            request.recompute()

    def forget(self, request: Request) -> None:
        """Drop a batch whose outcome somebody knows already."""
        self._unreported.pop(request.number, None)
        self._waiting = [each for each in self._waiting if each is not request]


class Request:
    """The handle of one batch; every call of it is made on all ranks."""

    def __init__(self, requests: Requests, meeting: Meeting, number: int, work: Work | None) -> None:
        self._requests = requests
        self._meeting = meeting
        self._work = work
        self._failure: Exception | None = None
        self._outcome: tuple[Answers, Exception | None] | None = None
        self.number = number
        """Its place among the engine's batches."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to do for it; known on rank 0 only."""
        return self._work is not None and (self._failure is not None or self._work.is_finished)

    def step(self) -> None:
        """Do a part of the work, on rank 0."""
        assert self._work is not None
        self._failure = outcome_of(self._work.step)[1]

    def recompute(self) -> None:
        """Compute its cache anew, on rank 0."""
        assert self._work is not None
        self._work.recompute()

    def done(self) -> bool:
        """Return whether `result` would not wait; does a part of the work where it would."""
        if self._outcome is None and not self.has_ended:
            self._requests.step()
        return self._outcome is not None or bool(self._meeting.share("done", self.has_ended)[0])

    def result(self, timeout_s: float | None = None) -> Answers:
        """Do the work that is left and return the completions of each prompt; a second call returns the same.

        Raises:
            EngineTimeout: They were not finished within `timeout_s`; `result` may be called again.
            EngineError: The work failed (the text says how) or was cancelled.
        """
        if self._outcome is None:
            self._outcome = self._exchange(timeout_s)
            self._requests.forget(self)
        return first_error_or([self._outcome])[0]

    def cancel(self) -> None:
        """Take the batch back; nothing happens to one that has ended."""
        if self._work is not None and not self.has_ended:
            self._failure = EngineError("these requests were cancelled.")
        self._requests.forget(self)

    def _exchange(self, timeout_s: float | None) -> tuple[Any, Exception | None]:
        answers, error = outcome_of(lambda: self._finish(timeout_s))
        packed = [] if answers is None else [np.frombuffer(bytearray(pickle.dumps(answers)), dtype=np.uint8)]
        error, arrays = self._meeting.share("result", error, packed)
        if isinstance(error, EngineTimeout):
            raise error
        return (pickle.loads(arrays[0].tobytes()) if arrays else None), error

    def _finish(self, timeout_s: float | None) -> Answers | None:
        if self._work is None:
            return None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.has_ended:
            if deadline is not None and time.monotonic() >= deadline:
                raise EngineTimeout(f"the completions were not finished within {timeout_s:g} s; they go on.")
            self._requests.step()
        if self._failure is not None:
            raise self._failure
        return self._work.answers()
