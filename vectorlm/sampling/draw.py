"""From logits to the next token: pure functions over a batch, in vLLM's order.

Penalties come first, then temperature, then the cuts (`min_p`, `top_k`, `top_p`), then the draw. Every setting is
a column, one value per row, so that one batch may hold requests of every kind. Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import torch


def penalise(
    logits: torch.Tensor,
    prompt_counts: torch.Tensor,
    counts: torch.Tensor,
    *,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Make tokens less likely that have been there.

    ``l / r`` where ``l > 0``, else ``l * r``, for tokens of prompt and completion (*Source* Keskar et al. 2019,
    arXiv 1909.05858, eq. 1, with the sign minded); then ``l - presence * [count > 0] - frequency * count``.

    Args:
        logits: Float [B, V].
        prompt_counts: [B, V], how often each token is in the prompt.
        counts: [B, V], how often each token is in the completion so far.
        repetition: [B, 1], above 0.
        presence: [B, 1].
        frequency: [B, 1].

    Returns:
        New logits [B, V].
    """
    seen = (prompt_counts + counts) > 0
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - presence * (counts > 0) - frequency * counts


def cut(
    logits: torch.Tensor, *, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Leave out unlikely tokens: by `min_p`, of the rest by `top_k`, of the rest by `top_p`.

    *Source*: top-p: Holtzman et al. 2019, arXiv 1904.09751, section 3.1; min-p: Nguyen et al. 2024,
    arXiv 2407.01082, section 3.

    Args:
        logits: Float [B, V], divided by the temperature.
        min_p: [B, 1], share of the likeliest token's probability that a token must have.
        top_k: int [B, 1], number of tokens kept; 0 or less keeps all.
        top_p: [B, 1], probability that the kept tokens make up at least.

    Returns:
        New logits [B, V], minus infinity where a token is left out; the likeliest always stays.
    """
    probabilities = logits.softmax(-1)
    logits = logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    ordered, order = logits.sort(-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # Round-off in the sum must not cut anything where nothing is to be cut.
    ordered = ordered.masked_fill((top_p < 1) & (before >= top_p), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Take the first token whose cumulative probability exceeds the row's uniform number.

    One number a row instead of noise for the whole vocabulary, so that a row's tokens depend on its own number
    alone: not on its neighbours, and not on the process's random state, which is the trainer's.

    Args:
        logits: Float [B, V].
        uniforms: float64 [B, 1], from 0 to below 1.

    Returns:
        Token ids, int64 [B].
    """
    # Double: in single precision the sum over 150,000 tokens would shift the far ones by a part in a thousand.
    sums = logits.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
