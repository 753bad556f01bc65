"""An engine that answers by a script, for the tests of training loops."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vectorlm.errors import EngineError
from vectorlm.sampling.backends.plain_weights import PlainWeights
from vectorlm.sampling.backends.transformers.generation import Parameters, read_parameters
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.weights.plan import Layout, TensorSpec
from vectorlm.types import Completion

if TYPE_CHECKING:
    pass

UNCUT = Parameters(max_tokens=None)
"""Without `max_tokens` an answer keeps its length."""


@dataclass
class _Request:
    prompt: Sequence[int]
    parameters: Parameters
    num_steps_left: int


class Characters:
    """The tokenizer of `Scripted`: a token is a character, and its chat template joins what the messages say."""

    def encode(self, text: str) -> list[int]:
        """Return the code points of a text."""
        return list(map(ord, text))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **how: Any) -> dict[str, list[int]]:
        """Return the code points of all contents, one after the other."""
        return {"input_ids": self.encode("".join(message["content"] for message in messages))}


class Scripted:
    """A `vectorlm.sampling.contract.Backend` without a model."""

    receiver = "live"
    vocab_size = sys.maxunicode + 1
    """A token is a character."""
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
        """Take the script; `model` and `receiver` are ignored, and the other arguments are those of `FakeEngine`.

        In one poll the oldest `max_num_seqs` requests take a step, which takes `step_s` seconds.
        """
        self._answer = answers if callable(answers) else _in_turn(answers)
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
        """Take one step; return the finished requests."""
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
        """Forget requests."""
        for name in names:
            self._requests.pop(name, None)

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None, weight_set: str) -> Layout:
        """Give every tensor a slot; any model fits."""
        return self._weights.connect(manifest, arena_path, weight_set)

    def pause(self) -> None:
        """Raise the error that `failures` has for an update."""
        self._fail("update")

    def load(
        self, version: int, checksums: Sequence[int] | None, weight_sets: Sequence[str], recompute: bool
    ) -> float:
        """Take the new version, and prove that the arena holds what was sent."""
        load_s = self._weights.load(checksums)
        self.version = version
        return load_s

    def resume(self) -> None:
        """Do nothing: the next `poll` goes on."""

    def sleep(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Do nothing: there is no memory to free."""

    def wake_up(self, parts: frozenset[str]) -> None:
        """Do nothing: there is no memory to take back."""

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
        completion = _completion(request.prompt, answer, self.version, request.parameters)
        return RequestOutput(name, [completion] * request.parameters.n)


def _in_turn(answers: Sequence[str]) -> Callable[[str, int], str]:
    left = iter(answers)

    def answer(prompt: str, version: int) -> str:
        for text in left:
            return text
        raise EngineError(f"the script has no answer left for {prompt!r}.")

    return answer


def _completion(prompt: Sequence[int], answer: str, version: int, parameters: Parameters) -> Completion:
    text = answer[: parameters.max_tokens]
    return Completion(
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(map(ord, text)),
        sampler_logprobs=() if parameters.logprobs is None else (-1.0,) * len(text),
        versions=(version,) * len(text),
        text=text,
        finish_reason="stop" if text == answer else "length",
    )
