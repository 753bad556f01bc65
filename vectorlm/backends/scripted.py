"""An engine that answers by a script, for the tests of training loops."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vectorlm.backends.plain_weights import PlainWeights
from vectorlm.backends.transformers.parameters import Parameters, read_parameters
from vectorlm.contracts import RequestOutput
from vectorlm.engine.engine import SamplingEngine
from vectorlm.errors import EngineError
from vectorlm.ranks.topology import Topology
from vectorlm.types import Completion, InFlight, UpdateReport
from vectorlm.weights.plan import Layout, TensorSpec

if TYPE_CHECKING:
    import torch

    from vectorlm.contracts import WeightSource

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
    """A `vectorlm.contracts.Backend` without a model."""

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


class FakeEngine(SamplingEngine):
    """A `SamplingEngine` without a model: it answers by a script, and keeps every other rule.

    >>> with FakeEngine(lambda prompt, version: f"{prompt} at step {version}") as engine:
    ...     engine.generate_text(["2 + 2"])
    ['2 + 2 at step -1']

    A token is a character: token ids are the code points of a text. `max_tokens` cuts an answer, `n` repeats it,
    `logprobs` gives each token -1; other parameters change nothing, but what `HFEngine` refuses is refused here too.

    Args:
        answers: A function of the prompt's text and the version, or texts that are handed out in turn.
        topology: This rank's place in the run; read from the environment when omitted.
        sampling_params: Used where a call gives none.
        num_steps: Steps that each batch takes: `poll`, `done` and `result` take one at a time.
        timeout_s: Longest silence tolerated from a rank, in seconds.
    """

    def __init__(
        self,
        answers: Callable[[str, int], str] | Sequence[str],
        *,
        topology: Topology | None = None,
        sampling_params: Any = None,
        num_steps: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        self.updates: list[int] = []
        """The versions that were loaded, in order; skipped updates are left out."""
        self._failures: dict[str, Exception] = {}
        super().__init__(
            "scripted",
            topology=topology,
            sampling_params=sampling_params,
            inference="vectorlm.backends.scripted:Scripted",
            channel="inline",
            timeout_s=timeout_s,
            answers=answers,
            num_steps=num_steps,
            failures=self._failures,
        )

    def fail_next(self, call: str, error: Exception) -> None:
        """Let the next ``sample`` (of any kind) or ``update`` raise `error`; called on all ranks."""
        if call not in ("sample", "update"):
            raise ValueError(f"call={call!r} cannot be told to fail: it must be 'sample' or 'update'.")
        self._failures[call] = error

    def update(
        self, model: torch.nn.Module | WeightSource, train_step: int, in_flight: InFlight = "refuse"
    ) -> UpdateReport:
        """Do what `SamplingEngine.update` does, and append the version to `updates`."""
        report = super().update(model, train_step, in_flight)
        if not report.skipped:
            self.updates.append(train_step)
        return report
