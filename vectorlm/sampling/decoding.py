"""A batch of completions written by ``transformers``' ``generate``, a slice of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from vectorlm.sampling.draw import cut, draw, penalise
from vectorlm.sampling.row import Row

SLICE_TOKENS = 32
SLICE_S = 1.0
"""Longest slice; between two slices weights may change and requests be taken back."""
GREEDY_BELOW = 1e-5
"""Temperatures below this take the likeliest token, as in vLLM."""


class Decoding:
    """B rows that are continued together, left-padded, until the last of them has ended.

    `generate` does what depends on the model (caches, positions, masks) and can be taken up again with the cache
    that it left; what is sampled, and when a row ends, is decided by the rows.
    """

    def __init__(self, model: Any, rows: Sequence[Row], version: Callable[[], int]) -> None:
        """Lay the prompts out.

        Args:
            model: A causal language model of transformers, in evaluation mode.
            rows: What to continue; written in place.
            version: Says which weights the model holds.
        """
        self._model = model
        self._rows = rows
        self._choose = _Choose(rows, version)
        self._has_ended = _HasEnded(rows)
        width = max(len(row.prompt_token_ids) for row in rows)
        self._choose.width = width
        self._tokens = torch.zeros(len(rows), width, dtype=torch.long, device=model.device)
        self._mask = torch.zeros_like(self._tokens)
        for index, row in enumerate(rows):
            start = width - len(row.prompt_token_ids)
            self._tokens[index, start:] = torch.tensor(row.prompt_token_ids)
            self._mask[index, start:] = 1
        self._cache: Any = None

    @property
    def is_finished(self) -> bool:
        """Whether every row has ended."""
        return all(row.finish_reason is not None for row in self._rows)

    @torch.no_grad()
    def step(self) -> None:
        """Sample the next slice of tokens."""
        config = GenerationConfig(
            do_sample=False,
            pad_token_id=0,
            max_new_tokens=SLICE_TOKENS,
            max_time=SLICE_S,
            return_dict_in_generate=True,
        )
        written = self._tokens.shape[1] - self._choose.width
        mask = torch.cat([self._mask, self._mask.new_ones(len(self._rows), written)], dim=1)
        output = self._model.generate(
            self._tokens,
            attention_mask=mask,
            past_key_values=self._cache,
            generation_config=config,
            logits_processor=[self._choose],
            stopping_criteria=[self._has_ended],
        )
        self._tokens, self._cache = output.sequences, output.past_key_values

    def forget_cache(self) -> None:
        """Have the next step compute everything that was written with the weights of then."""
        self._cache = None


class _Choose(LogitsProcessor):
    """Samples each row's next token from the raw logits, and leaves it as the only possible one."""

    def __init__(self, rows: Sequence[Row], version: Callable[[], int]) -> None:
        self._rows = rows
        self._version = version
        self.width = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raw = scores.float()
        for row in self._rows:
            if row.finish_reason is None:
                row.rewind(input_ids.shape[1] - self.width)
        tokens = _next_tokens(raw, self._rows)
        logprobs = raw.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
        version = self._version()
        for row, token, logprob in zip(self._rows, tokens.tolist(), logprobs, strict=True):
            if row.finish_reason is None:
                row.take(token, logprob, version)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


class _HasEnded(StoppingCriteria):
    """Says which rows have ended."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([row.finish_reason is not None for row in self._rows], device=input_ids.device)


def _next_tokens(raw: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Sample one token for each row from its float logits [B, V]; returns int64 [B]."""
    logits = raw.clone()
    for index, row in enumerate(rows):
        if forbidden := row.forbidden:
            logits[index, forbidden] = -torch.inf
    column = lambda name, dtype=torch.float32: torch.tensor(  # noqa: E731
        [[getattr(row.parameters, name)] for row in rows], dtype=dtype, device=raw.device
    )
    repetition, presence, frequency = map(
        column, ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    if (repetition != 1).any() or presence.any() or frequency.any():
        prompts = _counts([row.prompt_token_ids for row in rows], raw)
        counts = _counts([row.token_ids for row in rows], raw)
        logits = penalise(
            logits, prompts, counts, repetition=repetition, presence=presence, frequency=frequency
        )
    likeliest = logits.argmax(-1)
    temperature = column("temperature")
    if (temperature < GREEDY_BELOW).all():
        return likeliest
    logits = logits / torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
    min_p, top_k, top_p = column("min_p"), column("top_k", torch.long), column("top_p")
    # The cuts sort the vocabulary, which is the dearest part by far.
    if min_p.any() or (top_k > 0).any() or (top_p < 1).any():
        logits = cut(logits, min_p=min_p, top_k=top_k, top_p=top_p)
    uniforms = torch.tensor([[row.uniform()] for row in rows], dtype=torch.float64, device=raw.device)
    return torch.where(temperature[:, 0] < GREEDY_BELOW, likeliest, draw(logits, uniforms))


def _counts(tokens: Sequence[Sequence[int]], like: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros_like(like)
    for index, ids in enumerate(tokens):
        counts[index] = torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=like.shape[1])
    return counts
