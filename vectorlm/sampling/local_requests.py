"""Single requests to the engine that this rank owns, made by a thread beside the training loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vectorlm.errors import EngineError
from vectorlm.sampling import messages
from vectorlm.sampling.inline_channel import InlineChannel
from vectorlm.sampling.messages import unpack
from vectorlm.types import Completion

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
