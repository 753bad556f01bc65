"""The ratio of two policies' probabilities for the same tokens."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this on both sides before they are exponentiated: e^20 is 5e8."""


def log_ratio(policy_logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Return log(policy / other), detached from `other`, not clamped."""
    return policy_logprobs - other_logprobs.detach()


def ratio(policy_logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Return policy / other for each token [B, T]; gradient flows through the policy where the clamp leaves it."""
    return exp_clamped(log_ratio(policy_logprobs, other_logprobs))


def exp_clamped(log_ratios: torch.Tensor) -> torch.Tensor:
    """Exponentiate within the clamp."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum each row over its masked tokens [B]; what stands outside the mask is not read, NaN included."""
    return torch.where(mask.bool(), x, torch.zeros_like(x)).sum(dim=-1)


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average each row over its masked tokens [B]; 0 for a row without any."""
    return masked_sum(x, mask) / mask.sum(dim=-1).clamp(min=1)
