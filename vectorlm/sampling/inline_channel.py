"""The channel to an engine in the calling rank's process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from vectorlm.errors import EngineDied, EngineTimeout
from vectorlm.ranks.engine_ranks import CallResult, capture, results_or_first_error
from vectorlm.ranks.wait import report_wait
from vectorlm.sampling import messages
from vectorlm.sampling.sampler.scheduler import SAMPLER, Scheduler, open_backend, ready

SHOW_LIFE_EVERY_S = 0.5
BREAK_S = 0.1
"""Longest part of the time between two calls that counts as silence, because the engine samples only inside calls."""


class InlineChannel:
    """A `messages.Channel` to an engine in the calling process, which samples only inside `advance` and `answer`."""

    def __init__(self, start: messages.Start, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Prepare; `answer` to command 0 builds the backend. `while_waiting` is called between two steps."""
        self._start, self._while_waiting = start, while_waiting
        self._count = itertools.count(1)
        self._answers: dict[int, CallResult] = {}
        self._tell: dict[int, messages.TakeAnswer] = {}
        self._taken_back: list[int] = []
        self._moved_at = self._used_at = time.monotonic()
        """The times of the last progress (later by all breaks since then) and of the last step."""
        self._scheduler: Scheduler | None = None

    def send(self, command: Any) -> int:
        """Carry out a command; queue a `Generate`."""
        if self._scheduler is None:
            raise EngineDied("the engine is closed, or was never built.")
        self._abort()
        number = next(self._count)
        self._moved_at = self._used_at = time.monotonic()
        self._answers.update(self._scheduler.carry_out(number, command))
        return number

    def ask(self, commands: Sequence[messages.Generate], tell: messages.TakeAnswer) -> list[int]:
        """Queue commands; `advance` passes their answers to `tell`."""
        numbers = [self.send(command) for command in commands]
        self._tell |= dict.fromkeys(numbers, tell)
        return numbers

    def advance(self, until: Callable[[], bool] = lambda: True, timeout_s: float = 0.0) -> None:
        """Sample for one step, and continue until `until()` holds or the time is over."""
        self._abort()
        now = time.monotonic()
        self._moved_at += max(now - self._used_at - BREAK_S, 0.0)
        self._used_at, deadline_s = now, now + timeout_s
        while self._scheduler is not None and self._scheduler.busy:
            for number, message in self._scheduler.step():
                if not isinstance(message, messages.Part):
                    self._answers[number] = message
                elif number in self._tell:
                    self._tell[number](number, message)
            self._used_at = time.monotonic()
            if self._scheduler.has_progressed:
                self._moved_at, self._scheduler.has_progressed = self._used_at, False
            self._while_waiting()
            if time.monotonic() >= deadline_s or until():
                break
        for number in sorted(self._tell.keys() & self._answers.keys()):
            self._tell.pop(number)(number, self._answers.pop(number))

    def has_answer(self, number: int, silence_s: float) -> bool:
        """Return whether the answer is there; raise if it cannot come."""
        if number not in self._answers:
            self._require_progress("sampling", silence_s)
        return number in self._answers

    def answer(self, number: int, silence_s: float, waiting_for: str, deadline_s: float | None = None) -> Any:
        """Sample until the answer is there; for number 0, build the backend."""
        if number == 0:
            # Not in the constructor: here the other ranks wait for this call, and notice its signs of life.
            self._answers[0] = capture(lambda: self._build(silence_s), SAMPLER)
        while number not in self._answers:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise EngineTimeout(f"the engine is still {waiting_for}.")
            self._require_progress(waiting_for, silence_s)
            self.advance()
        return results_or_first_error([self._answers.pop(number)])[0]

    def _build(self, limit_s: float) -> messages.Ready:
        """Build the backend; for `limit_s` seconds a thread shows the other ranks that this one is alive."""
        began, is_built = time.monotonic(), threading.Event()

        def show_life() -> None:
            while not is_built.wait(SHOW_LIFE_EVERY_S) and time.monotonic() - began < limit_s:
                self._while_waiting()

        showing = threading.Thread(target=show_life, daemon=True)
        showing.start()
        try:
            with report_wait("waiting for the engine"):
                backend = open_backend(self._start)
        finally:
            is_built.set()
            showing.join()
        self._scheduler = Scheduler(backend, self._start.model)
        return ready(backend, time.monotonic() - began)

    def _require_progress(self, waiting_for: str, silence_s: float) -> None:
        if self._scheduler is None:
            raise EngineDied(f"the engine was closed while {waiting_for}.")
        if not self._scheduler.busy:
            raise EngineTimeout(
                f"the engine is paused while {waiting_for}: an earlier update() did not finish. Call update() again; "
                "pending requests then continue."
            )
        if self._used_at - self._moved_at > silence_s:
            raise EngineTimeout(f"the engine has sampled nothing for {silence_s:g} s while {waiting_for}.")

    def call(self, command: Any, silence_s: float) -> Any:
        """Carry out a command and return the value of its answer."""
        return self.answer(self.send(command), silence_s, f"answering {type(command).__name__}")

    def cancel(self, number: int) -> None:
        """Abort a `Generate` at the next call, because a handle may be garbage-collected in the middle of a step."""
        self._taken_back.append(number)

    def _abort(self) -> None:
        while self._taken_back:
            number = self._taken_back.pop()
            self._tell.pop(number, None)
            if self._answers.pop(number, None) is None and self._scheduler is not None:
                self._scheduler.carry_out(number, messages.Abort(number))

    def close(self) -> None:
        """End the backend."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
