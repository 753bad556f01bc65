"""The support of truncated sampling: the tokens that top_p, top_k and min_p allow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True)
class Support:
    """The tokens that a sampler can sample. Names, ranges and meanings are as in ``vllm.SamplingParams``."""

    top_p: float = 1.0
    """Keep the most likely tokens until their probabilities add up to this, above 0; 1 keeps all."""
    top_k: int = 0
    """Keep this number of most likely tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability, up to 1; 0 keeps all."""

    @classmethod
    def of(cls, sampling_params: Mapping[str, Any]) -> Support:
        """Return the support of sampling parameters."""
        given = {field.name: sampling_params.get(field.name) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def is_whole(self) -> bool:
        """Whether every token can be sampled."""
        return self.top_p >= 1 and self.top_k < 1 and self.min_p <= 0


WHOLE = Support()
"""The support of all tokens."""


def truncate(
    scores: torch.Tensor, tokens: torch.Tensor, support: Support, bitmasks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores with -inf outside the support S; their softmax is the sampler's distribution.

    ``log pi(a) = scores[a] - log sum_{b in S} exp(scores[b])``. The grammar, min_p, top_k and top_p restrict S in this
    order, which is vLLM's; top_p sees probabilities that add up to 1 again. A token at the bound of min_p stays, as do
    all tokens as likely as the k-th (vLLM's CUDA kernel keeps exactly k). Of several equal tokens at the bound of top_p
    some stay, including the sampled token.

    The sampled token is always in S, even if rounding or an update of the weights would move it outside, where its
    log-probability would be -inf. S carries no gradient; the scores do.

    Args:
        scores: float [N, V], logits divided by the temperature.
        tokens: int64 [N], the sampled tokens.
        support: The support of the sampler.
        bitmasks: int32 [N, ceil(V / 32)], the tokens that a grammar allowed, as bits; None for all.

    Returns:
        float [N, V], and bool [N]: whether S includes the token only because it was sampled.
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
    """Return which tokens cannot be sampled, bool [N, V]; NaN scores cut nothing and are not cut."""
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
    # top_p cuts the probability 1 - top_p. Tokens below an even share of it are all cut: sort only the others.
    width = int((~(left < total + math.log((1 - support.top_p) / size))).sum(dim=-1).max())
    likeliest, places = left.topk(width)
    probabilities = (likeliest - total).exp()
    is_beyond = probabilities.cumsum(dim=-1) - probabilities >= support.top_p
    return is_cut | torch.ones_like(is_cut).scatter_(-1, places, is_beyond)
