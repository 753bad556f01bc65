"""An engine in the calling rank's process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from vectorlm.errors import EngineDied, EngineTimeout
from vectorlm.ranks.wait import report_wait
from vectorlm.sampling import messages
from vectorlm.sampling.sampler.scheduler import Scheduler, open_backend, portable, ready


class InlineChannel:
    """The channel to an engine in the calling rank's process: it samples only while somebody asks for answers."""

    def __init__(self, start: messages.Start, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Build the backend, whose error is answer 0. `while_waiting` is called between two slices."""
        self._while_waiting = while_waiting
        self._count = itertools.count()
        self._answers: dict[int, messages.Answer | messages.Failed] = {}
        self._tell: dict[int, messages.TakeAnswer] = {}
        self._taken_back: list[int] = []
        self._moved_at = time.monotonic()
        self._scheduler: Scheduler | None = None
        began = time.perf_counter()
        number = next(self._count)
        try:
            with report_wait("waiting for the engine"):
                backend = open_backend(start)
            self._scheduler = Scheduler(backend, start.model)
            self._answers[number] = messages.Answer(ready(backend, time.perf_counter() - began))
        except Exception as error:
            self._answers[number] = messages.Failed(portable(error))

    def send(self, command: Any) -> int:
        """Carry out a command; a `Generate` is only queued."""
        if self._scheduler is None:
            raise EngineDied("the engine is closed, or was never built.")
        self._abort()
        number = next(self._count)
        self._moved_at = time.monotonic()
        self._answers.update(self._scheduler.carry_out(number, command))
        return number

    def ask(self, commands: Sequence[messages.Generate], tell: messages.TakeAnswer) -> list[int]:
        """Carry out commands; `advance` tells their answers."""
        numbers = [self.send(command) for command in commands]
        self._tell |= dict.fromkeys(numbers, tell)
        return numbers

    def advance(self, until: Callable[[], bool] = lambda: True, timeout_s: float = 0.0) -> None:
        """Sample for a slice, and go on while there is time and `until()` does not hold."""
        self._abort()
        deadline_s = time.monotonic() + timeout_s
        while self._scheduler is not None and self._scheduler.busy:
            for number, message in self._scheduler.step():
                if not isinstance(message, messages.Part):
                    self._answers[number] = message
                elif number in self._tell:
                    self._tell[number](number, message)
            if self._scheduler.has_progressed:
                self._moved_at, self._scheduler.has_progressed = time.monotonic(), False
            self._while_waiting()
            if time.monotonic() >= deadline_s or until():
                break
        for number in sorted(self._tell.keys() & self._answers.keys()):
            self._tell.pop(number)(number, self._answers.pop(number))

    def has_answer(self, number: int, silence_s: float) -> bool:
        """Return whether the answer is there; raise where nothing would bring it."""
        if number not in self._answers:
            self._require_progress("sampling", silence_s)
        return number in self._answers

    def answer(self, number: int, silence_s: float, waiting_for: str, deadline_s: float | None = None) -> Any:
        """Sample until the answer is there."""
        while number not in self._answers:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise EngineTimeout(f"the engine is still {waiting_for}.")
            self._require_progress(waiting_for, silence_s)
            self.advance()
        message = self._answers.pop(number)
        if isinstance(message, messages.Failed):
            raise message.error
        return message.value

    def _require_progress(self, waiting_for: str, silence_s: float) -> None:
        if self._scheduler is None:
            raise EngineDied(f"the engine was closed while {waiting_for}.")
        if not self._scheduler.busy:
            raise EngineTimeout(
                f"the engine stands still while {waiting_for}: an update was begun and never finished. Update again; "
                "the requests then go on."
            )
        if time.monotonic() - self._moved_at > silence_s:
            raise EngineTimeout(f"the engine has sampled nothing for {silence_s:g} s while {waiting_for}.")

    def call(self, command: Any, silence_s: float) -> Any:
        """Carry out a command and return the value of its answer."""
        return self.answer(self.send(command), silence_s, f"answering {type(command).__name__}")

    def cancel(self, number: int) -> None:
        """Abort a `Generate`, at the next call: a handle may be collected in the middle of a step."""
        self._taken_back.append(number)

    def _abort(self) -> None:
        while self._taken_back:
            number = self._taken_back.pop()
            self._tell.pop(number, None)
            if self._answers.pop(number, None) is None and self._scheduler is not None:
                self._scheduler.carry_out(number, messages.Abort(number))

    def close(self) -> None:
        """End the backend and let go of it."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
