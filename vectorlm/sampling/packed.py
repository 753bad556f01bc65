"""Completions as a few flat arrays, cheap to move between processes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vectorlm.types import Completion


@dataclass(frozen=True)
class PackedCompletions:
    """P prompts with C completions of N tokens in all; ragged rows lie end to end."""

    completions_per_prompt: np.ndarray
    """int32 [P]."""
    prompt_lengths: np.ndarray
    """int32 [P]."""
    prompt_token_ids: np.ndarray
    """int32, all prompts end to end."""
    lengths: np.ndarray
    """int32 [C]."""
    token_ids: np.ndarray
    """int32 [N]."""
    logprobs: np.ndarray
    """float32, the sampled tokens' log-probabilities of the completions that asked for them, end to end."""
    logprob_lengths: np.ndarray
    """int32 [C]: the completion's length, or 0 where none were asked for."""
    version: int
    """The weight version that sampled the tokens."""
    texts: tuple[str, ...]
    """C texts."""
    finish_reasons: tuple[str | None, ...]
    """C reasons."""

    def to_bytes(self) -> bytes:
        """Serialise; numpy arrays go as raw memory."""
        return pickle.dumps(self, protocol=5)

    def unpack(self) -> list[list[Completion]]:
        """Return the completions of each prompt."""
        prompts = np.split(self.prompt_token_ids, np.cumsum(self.prompt_lengths)[:-1])
        tokens = np.split(self.token_ids, np.cumsum(self.lengths)[:-1])
        logprobs = np.split(self.logprobs, np.cumsum(self.logprob_lengths)[:-1])
        answers: list[list[Completion]] = []
        first = 0
        for prompt, count in zip(prompts, self.completions_per_prompt, strict=True):
            prompt_ids = tuple(prompt.tolist())
            answers.append(
                [
                    Completion(
                        prompt_token_ids=prompt_ids,
                        token_ids=tuple(tokens[row].tolist()),
                        sampler_logprobs=tuple(logprobs[row].tolist()),
                        versions=(self.version,) * len(tokens[row]),
                        text=self.texts[row],
                        finish_reason=self.finish_reasons[row],
                    )
                    for row in range(first, first + int(count))
                ]
            )
            first += int(count)
        return answers


def pack_outputs(outputs: Sequence[Any], version: int) -> PackedCompletions:
    """Pack vLLM's finished ``RequestOutput`` objects, in the order of the prompts."""
    completions = [completion for output in outputs for completion in output.outputs]
    with_logprobs = [completion for completion in completions if completion.logprobs is not None]
    return PackedCompletions(
        completions_per_prompt=_ints(len(output.outputs) for output in outputs),
        prompt_lengths=_ints(len(output.prompt_token_ids) for output in outputs),
        prompt_token_ids=_ints(token for output in outputs for token in output.prompt_token_ids),
        lengths=_ints(len(completion.token_ids) for completion in completions),
        token_ids=_ints(token for completion in completions for token in completion.token_ids),
        logprobs=np.fromiter(_sampled_logprobs(with_logprobs), dtype=np.float32),
        logprob_lengths=_ints(len(completion.logprobs or ()) for completion in completions),
        version=version,
        texts=tuple(completion.text for completion in completions),
        finish_reasons=tuple(completion.finish_reason for completion in completions),
    )


def _ints(values: Any) -> np.ndarray:
    return np.fromiter(values, dtype=np.int32)


def _sampled_logprobs(completions: Sequence[Any]) -> Any:
    for completion in completions:
        for token, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
            yield candidates[token].logprob
