"""Tokens chosen by the covariance of advantage and log-probability, which are those that lower the entropy most.

`logprobs` and `advantages` are float [B, T], of the policy that sampled, and `mask` bool [B, T]. The choice is made
over a whole batch before its first optimizer step, so that it does not depend on how the batch is split; the paper
chooses again in each mini-batch.

Source: Cui et al. 2025, arXiv:2505.22617, eq. 10-13.
"""

from __future__ import annotations

import torch


def covariances(logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (A - mean A)(log pi - mean log pi) of each token, means over the mask, float [B, T]; 0 outside."""
    count = mask.sum().clamp(min=1)
    centred = [
        torch.where(mask, each - torch.where(mask, each, 0.0).sum() / count, 0.0)
        for each in (logprobs, advantages)
    ]
    return centred[0] * centred[1]


def highest(values: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    """Return the `share` of masked tokens with the highest values, at least one, bool [B, T] (KL-Cov)."""
    chosen = torch.zeros_like(mask)
    places = torch.nonzero(mask.flatten())[:, 0]
    if len(places):
        count = min(max(int(share * len(places)), 1), len(places))
        chosen.view(-1)[places[values.flatten()[places].topk(count).indices]] = True
    return chosen


def drawn_between(
    values: torch.Tensor, mask: torch.Tensor, share: float, low: float, high: float, seed: int
) -> torch.Tensor:
    """Draw that `share` of masked tokens from those with low < value < high, bool [B, T] (Clip-Cov).

    At least one is drawn, or all that there are.
    """
    chosen = torch.zeros_like(mask)
    places = torch.nonzero((mask & (values > low) & (values < high)).flatten())[:, 0]
    if len(places):
        count = min(max(int(share * int(mask.sum())), 1), len(places))
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
        chosen.view(-1)[places[order[:count].to(places.device)]] = True
    return chosen
