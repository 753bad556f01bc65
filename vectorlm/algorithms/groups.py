"""Advantages of completions, from the rewards of other completions of the batch.

`rewards` are float [P, G]; NaN marks a completion that could not be scored. A completion that is not `valid`, bool
[P, G], has advantage 0 and is left out of the mean and deviation that others are compared with. Advantages are float
[P, G]. A group of a single completion raises ValueError in `group_advantages` and `leave_one_out_advantages`.
"""

from __future__ import annotations

from typing import Literal

import torch


def group_advantages(
    rewards: torch.Tensor,
    scale: Literal["std", "none"] = "std",
    valid: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Compare each completion with the mean of its group: (r - mean) / (std + eps).

    0 for a group of equal rewards and for one with fewer than two completions left.

    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, section 4.1.2, with the unbiased standard deviation;
    Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, for ``scale="none"``, which does not divide.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale={scale!r} is unknown: it must be 'std' or 'none'.")
    kept, count = _kept(rewards, valid)
    enough = kept & (count >= 2)
    mean = _sum(rewards, kept) / count.clamp(min=1)
    centred = torch.where(enough, rewards - mean, 0.0)
    # A group of equal rewards must give exactly 0, but its mean may be rounded away from them.
    centred = torch.where(is_constant(rewards, kept), 0.0, centred)
    if scale == "none":
        return centred
    variance = centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt() + eps)


def leave_one_out_advantages(rewards: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Compare each completion with the mean of the others of its group: r[i] - mean(r[j], j != i).

    Each row sums to 0. 0 where no other completion is left.

    Source: Kool et al. 2019 (RLOO); Ahmadian et al. 2024, arXiv:2402.14740, eq. 7.
    """
    kept, count = _kept(rewards, valid)
    others = (_sum(rewards, kept) - rewards) / (count - 1).clamp(min=1)
    advantages = torch.where(kept & (count >= 2), rewards - others, 0.0)
    return torch.where(is_constant(rewards, kept), 0.0, advantages)


def batch_advantages(
    rewards: torch.Tensor, valid: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """Compare each completion with the mean of the whole batch, in units of its standard deviation.

    Groups may be single completions. Source: Hu 2025 (REINFORCE++), arXiv:2501.03262.
    """
    if rewards.numel() < 2:
        return torch.zeros_like(rewards)
    row_valid = None if valid is None else valid.reshape(1, -1)
    return group_advantages(rewards.reshape(1, -1), valid=row_valid, eps=eps).view_as(rewards)


def return_advantages(token_rewards: torch.Tensor, mask: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Compare the return of each token, its reward and all later ones', with the mean of the batch.

    `token_rewards` are float [B, T] and `mask` bool [B, T]; so are the advantages, in units of the standard deviation
    of the returns. Mean and deviation weigh each completion alike, whatever its length: if a completion is rewarded
    at its last token alone, its tokens have what `batch_advantages` gives it.

    Source: Hu 2025 (REINFORCE++), arXiv:2501.03262, where mean and deviation are over tokens.
    """
    returns = torch.where(mask, token_rewards, 0.0).flip(1).cumsum(1).flip(1)
    weights = mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
    num_rows = mask.any(dim=1).sum()
    if num_rows < 2 or is_constant(returns.view(1, -1), mask.view(1, -1)):
        return torch.zeros_like(token_rewards)
    centred = torch.where(mask, returns - (returns * weights).sum() / num_rows, 0.0)
    variance = (centred.square() * weights).sum() / (num_rows - 1)
    return centred / (variance.sqrt() + eps)


def baseline_advantages(
    rewards: torch.Tensor, baseline: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Compare each completion with a reward known beforehand, such as the greedy completion's (ReMax).

    `baseline` is float [P]; where it is NaN the completions of the prompt have advantage 0.

    Source: Li et al. 2023 (ReMax), arXiv:2310.10505, eq. 5.
    """
    advantages = rewards - baseline[:, None]
    kept = ~advantages.isnan() if valid is None else valid.bool() & ~advantages.isnan()
    return torch.where(kept, advantages, 0.0)


def whiten(x: torch.Tensor, mask: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + eps), with mean and unbiased variance over the masked entries.

    `x` is float of any shape, and `mask` bool or 0/1 of the same shape; give the whole batch of a step, so that the
    result does not depend on how it is split. The result is 0 outside the mask, and everywhere if the mask has fewer
    than two entries.
    """
    kept = mask.bool()
    count = kept.sum()
    if count < 2:
        return torch.zeros_like(x)
    inside = torch.where(kept, x, torch.zeros_like(x))
    mean = inside.sum() / count
    centred = torch.where(kept, x - mean, torch.zeros_like(x))
    return centred * torch.rsqrt(centred.square().sum() / (count - 1) + eps)


def is_constant(rewards: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return whether the `kept` rewards [P, G] of each group are equal, or none is kept; bool [P, 1]."""
    highest = torch.where(kept, rewards, -torch.inf).amax(dim=1, keepdim=True)
    lowest = torch.where(kept, rewards, torch.inf).amin(dim=1, keepdim=True)
    return highest <= lowest


def _kept(rewards: torch.Tensor, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which completions count, bool [P, G], and their number in each group [P, 1]."""
    if rewards.shape[1] < 2:
        raise ValueError(
            f"a group of {rewards.shape[1]} completion has no other to compare with: sample at least 2 per prompt."
        )
    kept = ~rewards.isnan() if valid is None else valid.bool() & ~rewards.isnan()
    return kept, kept.sum(dim=1, keepdim=True)


def _sum(rewards: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.where(kept, rewards, 0.0).sum(dim=1, keepdim=True)
