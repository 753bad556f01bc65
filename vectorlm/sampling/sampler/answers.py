"""The rules that a backend's answers are held to before any rank sees them."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vectorlm.errors import EngineError
from vectorlm.sampling.contract import RequestOutput
from vectorlm.types import Completion

FINISH_REASONS = (None, "stop", "length", "abort", "error", "repetition")
"""Those of vLLM."""
SLACK = 1e-4
"""The log-probability of a token that is certain may round to a number above 0."""


class AnswerRules:
    """Finds what no right backend answers, and names the backend, the prompt and the value."""

    def __init__(self, backend: Any, model: str | None) -> None:
        """Note the backend's first weights, and the size of its vocabulary or else that of the folder `model`."""
        self._name = type(backend).__name__
        self._vocab_size = backend.vocab_size if hasattr(backend, "vocab_size") else _vocab_size(model)
        self.loaded: list[int] = [backend.version]
        """The version of each load, in order."""

    def error(self, index: int, what: str) -> EngineError:
        """Return the error of the prompt with this index."""
        return EngineError(f"the backend {self._name} answered prompt {index} {what}.")

    def unknown(self, name: str) -> EngineError:
        """Return the error of a name that is nobody's; it may stand for any request in flight."""
        return EngineError(
            f"the backend {self._name} answered a request {name!r}, which was never submitted: RequestOutput.name must "
            "be the name that `submit` got."
        )

    def check_prompt(self, index: int, token_ids: Sequence[int]) -> None:
        """Raise EngineError for tokens that the model does not have: on CUDA they would end the whole engine."""
        size = self._vocab_size
        if size and token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            outside = next(token for token in token_ids if not 0 <= token < size)
            raise EngineError(f"prompt {index} has token {outside}: it must be from 0 to {size - 1}.")

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[Any],
        outputs: Sequence[RequestOutput],
        num_loads: int,
    ) -> None:
        """Raise EngineError for an answer that contradicts its prompt or its sampling parameters, or cannot be.

        Versions are those of the loads from number `num_loads` on, the last before the requests were submitted.
        """
        held = self.loaded[num_loads - 1 :]
        for index, (prompt, asked, output) in enumerate(zip(prompts, params, outputs, strict=True)):
            what = _wrong_record(prompt, asked, output.completions)
            for completion in output.completions:
                what = what or self._wrong_values(completion, held)
            if what:
                raise self.error(index, what)

    def _wrong_values(self, completion: Completion, held: Sequence[int]) -> str | None:
        """Return what is wrong with a completion's tokens, log-probabilities or versions; None where nothing is."""
        tokens, logprobs, versions = completion.token_ids, completion.sampler_logprobs, completion.versions
        size = self._vocab_size or sys.maxsize
        if tokens and (min(tokens) < 0 or max(tokens) >= size):
            token = next(each for each in tokens if not 0 <= each < size)
            limit = f" to {size - 1}" if self._vocab_size else ""
            return f"with token {token}, but token ids are from 0{limit}"
        # One addition each, which a number that is not finite survives.
        if not math.isfinite(sum(logprobs)):
            odd = next(each for each in logprobs if not math.isfinite(each))
            return f"with a log-probability of {odd}, which is not finite: the weights may hold NaN"
        if logprobs and max(logprobs) > SLACK:
            odd = next(each for each in logprobs if each > SLACK)
            return f"with a log-probability of {odd}, which must be at most 0"
        order, left = [version for version, _ in itertools.groupby(versions)], iter(held)
        if not all(version in left for version in order):
            shown = ", ".join(map(str, order))
            return f"with tokens of versions {shown}, but the weights were, in this order, {list(held)}"
        return None


def _wrong_record(prompt: Sequence[int], asked: Any, completions: Sequence[Completion]) -> str | None:
    """Return what contradicts the prompt or its sampling parameters; None where nothing does."""
    n, max_tokens = _parameter(asked, "n") or 1, _parameter(asked, "max_tokens")
    if len(completions) != n:
        return f"with {len(completions)} completions, but n={n}"
    ids = tuple(prompt)
    for each in completions:
        num_tokens, num_logprobs = len(each.token_ids), len(each.sampler_logprobs)
        if tuple(each.prompt_token_ids) != ids:
            return f"with prompt_token_ids={str(each.prompt_token_ids)[:60]}, but the prompt is {str(prompt)[:60]}"
        if each.finish_reason not in FINISH_REASONS:
            return f"with finish_reason={each.finish_reason!r}, but it must be one of {FINISH_REASONS}"
        if max_tokens is not None and num_tokens > max_tokens:
            return f"with {num_tokens} tokens, but max_tokens={max_tokens}"
        if len(each.versions) != num_tokens:
            return f"with {len(each.versions)} versions for {num_tokens} tokens"
        if num_logprobs != num_tokens and (num_logprobs or _parameter(asked, "logprobs") is not None):
            return f"with {num_logprobs} sampler_logprobs for {num_tokens} tokens"
    return None


def _parameter(asked: Any, name: str) -> Any:
    """Return a sampling parameter, of a mapping or of an object; None if it is not given."""
    return asked.get(name) if isinstance(asked, Mapping) else getattr(asked, name, None)


def _vocab_size(model: str | None) -> int | None:
    path = Path(model or "", "config.json")
    if model is None or not path.is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    size: int | None = (config.get("text_config") or config).get("vocab_size")
    return size
