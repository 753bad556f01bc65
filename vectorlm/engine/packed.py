"""Completions as a few flat arrays, cheap to move between processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from vectorlm.contracts import RequestOutput
from vectorlm.plugin import load_plugin
from vectorlm.types import Completion

FINISH_REASONS = (None, "stop", "length", "abort", "error", "repetition")
"""vLLM's finish reasons, in the order of their codes."""
ABSENT = -1
"""The length of a row that is None."""


@dataclass(frozen=True)
class Ragged:
    """Rows of unequal length, end to end in one array; a row may be None."""

    lengths: np.ndarray
    """int32 [rows], `ABSENT` where a row is None."""
    values: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any] | None], dtype: Any) -> Ragged:
        """Lay `rows` of numbers end to end."""
        rows = list(rows)
        lengths = ints(ABSENT if row is None else len(row) for row in rows)
        return cls(lengths, np.fromiter((value for row in rows for value in row or ()), dtype))

    @classmethod
    def of_texts(cls, texts: Iterable[str | None]) -> Ragged:
        """Lay texts end to end, in UTF-8 that allows lone surrogates."""
        encoded = [None if text is None else text.encode("utf-8", "surrogatepass") for text in texts]
        lengths = ints(ABSENT if text is None else len(text) for text in encoded)
        return cls(lengths, np.frombuffer(b"".join(text or b"" for text in encoded), np.uint8))

    def rows(self, first: int = 0, last: int | None = None) -> list[np.ndarray | None]:
        """Return rows `first` to `last` (exclusive), each a view."""
        ends = np.cumsum(np.maximum(self.lengths, 0))
        bounds = zip(self.lengths[first:last].tolist(), ends[first:last].tolist(), strict=True)
        return [None if length == ABSENT else self.values[end - length : end] for length, end in bounds]

    def texts(self, first: int = 0, last: int | None = None) -> list[str | None]:
        """Return rows `first` to `last` (exclusive) as texts."""
        rows = self.rows(first, last)
        return [None if row is None else row.tobytes().decode("utf-8", "surrogatepass") for row in rows]


def ints(values: Iterable[int]) -> np.ndarray:
    """Return int32 numbers as an array."""
    return np.fromiter(values, np.int32)


@dataclass(frozen=True)
class PackedCompletions:
    """P prompts with C completions."""

    counts: np.ndarray
    """int32 [P], the number of completions of each prompt."""
    prompts: Ragged
    """int32 token ids [P rows]."""
    tokens: Ragged
    """int32 token ids [C rows]."""
    logprobs: Ragged
    """float32 log-probabilities of the sampled tokens [C rows]; a row is empty where none were asked for."""
    texts: Ragged
    """UTF-8 [C rows]."""
    finish_codes: np.ndarray
    """int8 [C], indices into `FINISH_REASONS`."""
    versions: Ragged
    """int32 weight versions of the tokens [C rows]."""

    @classmethod
    def pack(cls, outputs: Sequence[RequestOutput]) -> PackedCompletions:
        """Pack the outputs of a `Backend`, in the order of the prompts."""
        completions = [completion for each in outputs for completion in each.completions]
        prompts = (each.completions[0].prompt_token_ids if each.completions else () for each in outputs)
        codes = [FINISH_REASONS.index(each.finish_reason) for each in completions]
        return cls(
            counts=ints(len(each.completions) for each in outputs),
            prompts=Ragged.of(prompts, np.int32),
            tokens=Ragged.of((each.token_ids for each in completions), np.int32),
            logprobs=Ragged.of((each.sampler_logprobs for each in completions), np.float32),
            texts=Ragged.of_texts(each.text for each in completions),
            finish_codes=np.array(codes, np.int8),
            versions=Ragged.of((each.versions for each in completions), np.int32),
        )

    def arrays(self) -> list[np.ndarray]:
        """Return the fields as plain arrays, for `from_arrays`."""
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
        columns = zip(
            [prompt for prompt, count in zip(prompts, counts, strict=True) for _ in range(count)],
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


def packing(as_request_outputs: bool) -> Any:
    """Return the class that packs and unpacks: `PackedCompletions`, or the vLLM backend's for vLLM's objects."""
    if as_request_outputs:
        return load_plugin("vectorlm.backends.vllm.request_outputs:PackedOutputs")
    return PackedCompletions


def _completion(prompt: Any, tokens: Any, logprobs: Any, versions: Any, text: Any, code: int) -> Completion:
    return Completion(
        prompt_token_ids=prompt,
        token_ids=tuple(tokens.tolist()),
        sampler_logprobs=tuple(logprobs.tolist()),
        versions=tuple(versions.tolist()),
        text=text,
        finish_reason=FINISH_REASONS[code],
    )
