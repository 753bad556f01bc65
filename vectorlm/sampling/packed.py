"""Completions as a few flat arrays, cheap to move between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from vectorlm.contracts import Finished
from vectorlm.sampling.ragged import Ragged, ints
from vectorlm.types import Completion

FINISH_REASONS = (None, "stop", "length", "abort", "error", "repetition")
"""vLLM's, in the order of their codes."""


@dataclass(frozen=True)
class PackedCompletions:
    """P prompts with C completions of N tokens in all."""

    counts: np.ndarray
    """int32 [P], completions of each prompt."""
    prompts: Ragged
    """int32 token ids [P rows]."""
    tokens: Ragged
    """int32 token ids [C rows]."""
    logprobs: Ragged
    """float32, the sampled tokens' log-probabilities [C rows]; a row is empty where none were asked for."""
    texts: Ragged
    """UTF-8 [C rows]."""
    finish_codes: np.ndarray
    """int8 [C], places in `FINISH_REASONS`."""
    versions: Ragged
    """int32 weight versions of the tokens [C rows]."""

    def arrays(self) -> list[np.ndarray]:
        """Return all that this holds as plain arrays; `from_arrays` turns them back."""
        ragged = (self.prompts, self.tokens, self.logprobs, self.texts, self.versions)
        flat = [array for each in ragged for array in (each.lengths, each.values)]
        return [self.counts, *flat, self.finish_codes]

    @classmethod
    def from_arrays(cls, arrays: Sequence[np.ndarray]) -> PackedCompletions:
        """Rebuild from what `arrays` returned."""
        counts, *flat, finish_codes = arrays
        prompts, tokens, logprobs, texts, versions = (
            Ragged(*flat[place : place + 2]) for place in range(0, len(flat), 2)
        )
        return cls(counts, prompts, tokens, logprobs, texts, finish_codes, versions)

    def unpack(self, first: int = 0, last: int | None = None) -> list[list[Completion]]:
        """Return the completions of prompts `first` to `last` (exclusive)."""
        ends = np.cumsum(self.counts)
        counts = self.counts[first:last].tolist()
        if not counts:
            return []
        start, stop = int(ends[first]) - counts[0], int(ends[first + len(counts) - 1])
        prompts = [tuple(row.tolist()) for row in self.prompts.rows(first, last) if row is not None]
        owners = [prompt for prompt, count in zip(prompts, counts, strict=True) for _ in range(count)]
        columns = zip(
            owners,
            self.tokens.rows(start, stop),
            self.logprobs.rows(start, stop),
            self.versions.rows(start, stop),
            self.texts.texts(start, stop),
            self.finish_codes[start:stop].tolist(),
            strict=True,
        )
        flat = [_completion(*column) for column in columns]
        bounds = np.cumsum([0, *counts]).tolist()
        return [flat[begin:end] for begin, end in pairwise(bounds)]


def _completion(prompt: Any, tokens: Any, logprobs: Any, versions: Any, text: Any, code: int) -> Completion:
    return Completion(
        prompt_token_ids=prompt,
        token_ids=tuple(tokens.tolist()),
        sampler_logprobs=tuple(logprobs.tolist()),
        versions=tuple(versions.tolist()),
        text=text,
        finish_reason=FINISH_REASONS[code],
    )


def pack_finished(finished: Sequence[Finished]) -> PackedCompletions:
    """Pack what an `Inference` has finished, in the order of the prompts."""
    completions = [completion for each in finished for completion in each.completions]
    return PackedCompletions(
        counts=ints(len(each.completions) for each in finished),
        prompts=Ragged.of((each.prompt_token_ids for each in finished), np.int32),
        tokens=Ragged.of((completion.token_ids for completion in completions), np.int32),
        logprobs=Ragged.of((completion.logprobs or () for completion in completions), np.float32),
        texts=Ragged.of_texts(completion.text for completion in completions),
        finish_codes=np.array([FINISH_REASONS.index(each.finish_reason) for each in completions], np.int8),
        versions=Ragged.of((completion.versions for completion in completions), np.int32),
    )
