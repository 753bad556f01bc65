"""Single requests to the engine that this rank owns, made by a thread beside the training loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from vectorlm.engine import messages
from vectorlm.engine.inline_channel import InlineChannel
from vectorlm.engine.packed import unpack
from vectorlm.errors import EngineError
from vectorlm.types import Completion

Hear = Callable[[Completion], None]
"""Gets what was sampled since it was called last."""


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
        self._new: list[tuple[messages.Generate, Future[list[Completion]]]] = []
        self._sent: dict[int, Future[list[Completion]]] = {}
        self._taken_back: list[int] = []
        self._hears: dict[Future[list[Completion]], Hear] = {}

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
        future: Future[list[Completion]] = Future()
        command = messages.Generate([prompt], [sampling_params], False, is_streamed=hear is not None)
        with self._lock:
            self._new.append((command, future))
            if hear is not None:
                self._hears[future] = hear
        return future

    def flush(self) -> None:
        """Send what was asked, except during an update."""
        with self._lock:
            if not self.is_inline:
                self._send()

    def take_back(self, future: Future[list[Completion]]) -> None:
        """Forget a request; one that was answered stays as it is."""
        with self._lock:
            self._hears.pop(future, None)
            self._new = [each for each in self._new if each[1] is not future]
            numbers = [number for number, each in self._sent.items() if each is future]
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
            numbers = self._channel.ask([command for command, _ in new], self._answer)
        except EngineError as error:
            for _, future in new:
                _settle(future, messages.Failed(error))
        else:
            self._sent |= {number: future for (_, future), number in zip(new, numbers, strict=True)}

    def _answer(self, number: int, message: messages.Answer | messages.Failed | messages.Part) -> None:
        """Take an answer or a part of one, in the thread that received it."""
        with self._lock:
            if isinstance(message, messages.Part):
                asked = self._sent.get(number)
                if asked is not None and asked in self._hears:
                    self._hears[asked](message.completion)
                return
            future = self._sent.pop(number, None)
        if future is not None:
            self._hears.pop(future, None)
            _settle(future, message)


def _settle(future: Future[list[Completion]], message: messages.Answer | messages.Failed) -> None:
    """Give a request its answer, unless whoever asked has gone."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(message, messages.Failed):
        future.set_exception(message.error)
    else:
        future.set_result(unpack(message.value)[0])
