"""The backend of `FakeEngine`: it answers by a script, for tests of training loops."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vectorlm.errors import EngineError
from vectorlm.sampling.backends.generation import Parameters, read_parameters
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.weights.copy_list import PlainWeights
from vectorlm.sampling.weights.plan import Layout, TensorSpec
from vectorlm.types import Completion

UNCUT = Parameters(max_tokens=None)
"""The default parameters: answers keep their length."""


@dataclass
class _Request:
    prompt: Sequence[int]
    parameters: Parameters
    num_steps_left: int


class Characters:
    """The tokenizer of `Scripted`: a token is a code point, a chat the joined contents of its messages."""

    def encode(self, text: str) -> list[int]:
        """Return the code points of a text."""
        return list(map(ord, text))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **how: Any) -> dict[str, list[int]]:
        """Return the code points of the contents of all messages."""
        return {"input_ids": self.encode("".join(message["content"] for message in messages))}


class Scripted:
    """A `vectorlm.sampling.contract.Backend` without a model."""

    receiver = "live"
    vocab_size = sys.maxunicode + 1
    """A token is a code point."""
    tokenizer = Characters()

    def __init__(
        self,
        model: str,
        *,
        receiver: str = "auto",
        answers: Callable[[str, int], str] | Sequence[str],
        num_steps: int = 1,
        max_num_seqs: int = 1 << 20,
        step_s: float = 0.0,
        failures: dict[str, Exception] | None = None,
    ) -> None:
        """Set the script. The arguments are the same as for `FakeEngine`; `model` and `receiver` are ignored.

        Every poll takes `step_s` seconds and advances the oldest `max_num_seqs` requests by one step.
        """
        if callable(answers):
            self._answer = answers
        else:
            remaining = iter(answers)

            def next_answer(prompt: str, version: int) -> str:
                for text in remaining:
                    return text
                raise EngineError(f"answers: the script has no answer left for {prompt!r}.")

            self._answer = next_answer
        self._num_steps, self._step_s = num_steps, step_s
        self._failures = {} if failures is None else failures
        self._requests: dict[str, _Request] = {}
        self._weights = PlainWeights()
        self.max_num_seqs = max_num_seqs
        self.version = -1
        self.progress = 0

    def submit(self, name: str, prompt: Sequence[int], sampling_params: Any) -> None:
        """Queue one prompt."""
        parameters = read_parameters(sampling_params, UNCUT)
        self._fail("sample")
        self._requests[name] = _Request(prompt, parameters, self._num_steps)

    def poll(self) -> list[RequestOutput]:
        """Advance requests by one step; return those that are finished."""
        self.progress += bool(self._requests)
        time.sleep(self._step_s)
        outputs = []
        for name, request in list(self._requests.items())[: self.max_num_seqs]:
            request.num_steps_left -= 1
            if request.num_steps_left <= 0:
                del self._requests[name]
                outputs.append(self._finish(name, request))
        return outputs

    def cancel(self, names: Iterable[str]) -> None:
        """Drop requests."""
        for name in names:
            self._requests.pop(name, None)

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None, weight_set: str) -> Layout:
        """Give every tensor a slot; any model is accepted."""
        return self._weights.connect(manifest, arena_path, weight_set)

    def pause(self) -> None:
        """Raise the error of `failures` for an update, if there is one."""
        self._fail("update")

    def load(
        self, version: int, checksums: Sequence[int] | None, weight_sets: Sequence[str], recompute: bool
    ) -> float:
        """Set the new version and compare the arena with the checksums."""
        load_s = self._weights.load(checksums)
        self.version = version
        return load_s

    def resume(self) -> None:
        """Do nothing: the next `poll` continues."""

    def sleep(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Do nothing: there is no memory to free."""

    def wake_up(self, parts: frozenset[str]) -> None:
        """Do nothing: there is no memory to allocate."""

    def close(self) -> None:
        """Close the arena."""
        self._weights.close()

    def _fail(self, call: str) -> None:
        if (error := self._failures.pop(call, None)) is not None:
            raise error

    def _finish(self, name: str, request: _Request) -> RequestOutput:
        try:
            answer = self._answer("".join(map(chr, request.prompt)), self.version)
        except EngineError as error:
            return RequestOutput(name, (), error=error)
        text = answer[: request.parameters.max_tokens]
        completion = Completion(
            prompt_token_ids=tuple(request.prompt),
            token_ids=tuple(map(ord, text)),
            sampler_logprobs=() if request.parameters.logprobs is None else (-1.0,) * len(text),
            versions=(self.version,) * len(text),
            text=text,
            finish_reason="stop" if text == answer else "length",
        )
        return RequestOutput(name, [completion] * request.parameters.n)
