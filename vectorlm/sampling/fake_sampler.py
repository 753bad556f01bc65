"""What stands behind a fake engine: a script, and the failures that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vectorlm.errors import EngineError
from vectorlm.sampling.parameters import Parameters, read_each
from vectorlm.sampling.requests import Answers
from vectorlm.types import Completion, Prompt
from vectorlm.weights.plan import TensorSpec, manifest_of
from vectorlm.weights.whole import require_same

if TYPE_CHECKING:
    import torch

UNCUT = Parameters(max_tokens=None)
"""An answer is as long as its author wrote it, unless the caller says otherwise."""


class FakeSampler:
    """Answers prompts by a script."""

    def __init__(
        self,
        answers: Callable[[Any, int], str] | Sequence[str],
        num_steps: int,
        version: Callable[[], int],
        failures: dict[str, Exception],
    ) -> None:
        """Take the script.

        Args:
            answers: A function of prompt and version, or texts in turn.
            num_steps: Steps that each batch takes.
            version: Says which version samples.
            failures: Errors to raise once, by ``sample`` or ``update``.
        """
        self._script = None if callable(answers) else iter(answers)
        self._answer = answers if callable(answers) else lambda prompt, version: self._next(prompt)
        self._num_steps = num_steps
        self._version = version
        self._failures = failures
        self._manifest: Sequence[TensorSpec] | None = None

    def begin(self, prompts: Sequence[Prompt], sampling_params: Any) -> FakeWork:
        """Make the work of one batch."""
        parameters = read_each(sampling_params, len(prompts), UNCUT)
        self._fail("sample")
        pairs = list(zip(prompts, parameters, strict=True))
        return FakeWork(lambda: [self._complete(*pair) for pair in pairs], self._num_steps if pairs else 0)

    def check(self, model: torch.nn.Module) -> None:
        """Raise `WeightMismatch` unless this is the model of the first update."""
        self._fail("update")
        if self._manifest is not None:
            require_same(manifest_of(model), self._manifest)

    def replace(self, model: torch.nn.Module) -> int:
        """Remember which model it is."""
        self._manifest = manifest_of(model)
        return 0

    def drop(self) -> None:
        """Do nothing: there are no weights."""

    def restore(self) -> None:
        """Do nothing: there are no weights."""

    def _next(self, prompt: Prompt) -> str:
        assert self._script is not None
        for answer in self._script:
            return answer
        raise EngineError(f"the script has no answer left for {prompt!r}.")

    def _fail(self, call: str) -> None:
        if (error := self._failures.pop(call, None)) is not None:
            raise error

    def _complete(self, prompt: Prompt, parameters: Parameters) -> list[Completion]:
        version = self._version()
        return [_completion(prompt, self._answer(prompt, version), version, parameters)] * parameters.n


class FakeWork:
    """One batch; its answers are made when it is through."""

    def __init__(self, answer: Callable[[], Answers], num_steps: int) -> None:
        self._answer = answer
        self._num_left = num_steps
        self._answers: Answers = []

    @property
    def is_finished(self) -> bool:
        """Whether its steps are through."""
        return self._num_left == 0

    def step(self) -> None:
        """Take one of its steps."""
        self._num_left -= 1
        if self.is_finished:
            self._answers = self._answer()

    def recompute(self) -> None:
        """Do nothing: there is no cache."""

    def answers(self) -> Answers:
        """Return the scripted completions."""
        return self._answers


def _completion(prompt: Any, answer: str, version: int, parameters: Parameters) -> Completion:
    text = answer[: parameters.max_tokens]
    return Completion(
        prompt_token_ids=tuple(_token_ids(prompt)),
        token_ids=tuple(map(ord, text)),
        sampler_logprobs=() if parameters.logprobs is None else (-1.0,) * len(text),
        versions=(version,) * len(text),
        text=text,
        finish_reason="stop" if text == answer else "length",
    )


def _token_ids(prompt: Any) -> Iterator[int]:
    for part in prompt:
        if isinstance(part, Mapping):
            yield from map(ord, part["content"])
        else:
            yield ord(part) if isinstance(part, str) else int(part)
