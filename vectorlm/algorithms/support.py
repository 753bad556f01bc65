"""The support of truncated sampling: the tokens that top_p, top_k and min_p leave to be drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True)
class Support:
    """Which tokens a sampler may draw; names, ranges and meanings are those of ``vllm.SamplingParams``."""

    top_p: float = 1.0
    """Keep the likeliest tokens until their probabilities add up to this, above 0; 1 keeps all."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the likeliest token's probability, up to 1; 0 keeps all."""

    @classmethod
    def of(cls, sampling_params: Mapping[str, Any]) -> Support:
        """Return the support that sampling parameters ask for."""
        given = {each.name: sampling_params.get(each.name) for each in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def is_whole(self) -> bool:
        """Whether every token can be drawn."""
        return self.top_p >= 1 and self.top_k < 1 and self.min_p <= 0


WHOLE = Support()
"""Every token can be drawn."""


def truncate(
    scores: torch.Tensor, tokens: torch.Tensor, support: Support, bitmasks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores with -inf outside the support, so that their softmax is what the sampler drew from.

    ``log pi(a) = scores[a] - log sum_{b in S} exp(scores[b])``, where S is what a grammar allows, of that what min_p
    leaves, of that what top_k leaves, and of that, with probabilities that add up to 1 again, what top_p leaves: vLLM's
    order. A token at the bound of min_p stays, as do all that are as likely as the k-th (vLLM's kernel for CUDA keeps k
    in all). At the bound of top_p some of several equal tokens stay, and the drawn one is among them.

    The drawn token is always in S: rounding, or weights that have moved since, may have put it outside, where its
    log-probability would be -inf. S carries no gradient; the scores do.

    Args:
        scores: float [N, V], logits divided by the temperature.
        tokens: int64 [N], the tokens that were drawn.
        support: What the sampler was told.
        bitmasks: int32 [N, ceil(V / 32)], the tokens that a grammar allowed, as bits; None for all.

    Returns:
        float [N, V], and bool [N]: whether S has the token only because it was drawn.
    """
    drawn = tokens[:, None]
    if bitmasks is not None:
        scores = scores.masked_fill(~_bits(bitmasks, scores.shape[-1]), -torch.inf)
        if support.is_whole:
            return scores, torch.zeros_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        is_cut = _is_cut(scores, support)
        is_outside = is_cut.gather(-1, drawn)
        least, place = scores.masked_fill(is_cut, torch.inf).min(dim=-1, keepdim=True)
        is_equal = is_outside & (scores.gather(-1, drawn) == least)
        is_cut.scatter_(-1, place, is_equal).scatter_(-1, drawn, False)
    return scores.masked_fill(is_cut, -torch.inf), (is_outside & ~is_equal)[:, 0]


def _bits(bitmasks: torch.Tensor, size: int) -> torch.Tensor:
    """Return the first `size` bits of each row, bool [N, size]."""
    places = torch.arange(8, dtype=torch.uint8, device=bitmasks.device)
    return ((bitmasks.view(torch.uint8)[..., None] >> places) & 1).flatten(1)[:, :size].bool()


def _is_cut(scores: torch.Tensor, support: Support) -> torch.Tensor:
    """Return which tokens cannot be drawn, bool [N, V]; a score that is not a number cuts nothing, and stays."""
    size = scores.shape[-1]
    is_cut = torch.zeros_like(scores, dtype=torch.bool)
    if support.min_p > 0:
        is_cut |= scores < scores.amax(dim=-1, keepdim=True) + math.log(support.min_p)
    if 0 < support.top_k < size:
        is_cut |= scores < scores.topk(support.top_k).values[:, -1:]
    if support.top_p >= 1 or not len(scores):
        return is_cut
    left = scores.masked_fill(is_cut, -torch.inf)
    total = left.logsumexp(dim=-1, keepdim=True)
    # Tokens below an even share of what top_p cuts add up to less than that: only the others need to be sorted.
    width = int((~(left < total + math.log((1 - support.top_p) / size))).sum(dim=-1).max())
    likeliest, places = left.topk(width)
    probabilities = (likeliest - total).exp()
    is_beyond = probabilities.cumsum(dim=-1) - probabilities >= support.top_p
    return is_cut | torch.ones_like(is_cut).scatter_(-1, places, is_beyond)
