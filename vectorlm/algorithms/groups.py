"""Advantages of completions from the rewards of completions beside them."""

from __future__ import annotations

from typing import Literal

import torch

Scale = Literal["std", "none"]


def group_advantages(
    rewards: torch.Tensor, scale: Scale = "std", valid: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """Compare each completion with the mean of its group: (r - mean) / (std + eps).

    ``scale="std"`` is GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2; the standard deviation is the unbiased
    one), ``scale="none"`` leaves the division out, as Dr. GRPO does (Liu et al. 2025, arXiv:2503.20783).

    Args:
        rewards: float [P, G]; NaN marks a completion that could not be scored.
        scale: Whether to divide by the group's standard deviation.
        valid: bool [P, G]; a completion that is not valid has advantage 0 and leaves its group's mean and deviation.
        eps: Added to the standard deviation.

    Returns:
        float [P, G]; 0 for a group of equal rewards and for one with fewer than two completions left.

    Raises:
        ValueError: A group is a single completion, or `scale` is unknown.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale={scale!r} is unknown: it must be 'std' or 'none'.")
    kept, count = _kept(rewards, valid)
    enough = kept & (count >= 2)
    mean = _sum(rewards, kept) / count.clamp(min=1)
    centred = torch.where(enough, rewards - mean, 0.0)
    # A group whose rewards are all the same must give exactly 0; its mean may be rounded away from them.
    centred = torch.where(is_constant(rewards, kept), 0.0, centred)
    if scale == "none":
        return centred
    variance = centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt() + eps)


def leave_one_out_advantages(rewards: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Compare each completion with the mean of the others of its group: r[i] - mean(r[j], j != i).

    Source: Kool et al. 2019 (RLOO); Ahmadian et al. 2024, arXiv:2402.14740, eq. 7.

    Args:
        rewards: float [P, G]; NaN marks a completion that could not be scored.
        valid: bool [P, G]; a completion that is not valid has advantage 0 and is in nobody's mean.

    Returns:
        float [P, G]; each row sums to 0. 0 where no other completion is left.

    Raises:
        ValueError: A group is a single completion.
    """
    kept, count = _kept(rewards, valid)
    others = (_sum(rewards, kept) - torch.where(kept, rewards, 0.0)) / (count - 1).clamp(min=1)
    advantages = torch.where(kept & (count >= 2), rewards - others, 0.0)
    return torch.where(is_constant(rewards, kept), 0.0, advantages)


def batch_advantages(
    rewards: torch.Tensor, valid: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """Compare each completion with the mean of the whole batch, in units of its standard deviation.

    Source: Hu 2025 (REINFORCE++), arXiv:2501.03262.

    Args:
        rewards: float [P, G]; NaN marks a completion that could not be scored; groups may be single completions.
        valid: bool [P, G]; a completion that is not valid has advantage 0 and leaves mean and deviation.
        eps: Added to the standard deviation.

    Returns:
        float [P, G].
    """
    if rewards.numel() < 2:
        return torch.zeros_like(rewards)
    row_valid = None if valid is None else valid.reshape(1, -1)
    return group_advantages(rewards.reshape(1, -1), valid=row_valid, eps=eps).view_as(rewards)


def baseline_advantages(
    rewards: torch.Tensor, baseline: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Compare each completion with a reward known beforehand, such as the greedy completion's (ReMax).

    Source: Li et al. 2023 (ReMax), arXiv:2310.10505, eq. 5.

    Args:
        rewards: float [P, G]; NaN marks a completion that could not be scored.
        baseline: float [P], one per prompt; where it is NaN the prompt's completions have advantage 0.
        valid: bool [P, G].

    Returns:
        float [P, G].
    """
    advantages = rewards - baseline[:, None]
    kept = ~advantages.isnan() if valid is None else valid.bool() & ~advantages.isnan()
    return torch.where(kept, advantages, 0.0)


def _kept(rewards: torch.Tensor, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which completions count, and how many of each group do [P, 1]."""
    if rewards.shape[1] < 2:
        raise ValueError(
            f"a group of {rewards.shape[1]} completion has nothing to be compared with: sample at least 2 per prompt."
        )
    kept = ~rewards.isnan() if valid is None else valid.bool() & ~rewards.isnan()
    return kept, kept.sum(dim=1, keepdim=True)


def _sum(rewards: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.where(kept, rewards, 0.0).sum(dim=1, keepdim=True)


def is_constant(rewards: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return whether the rewards that count are all the same, or there are none.

    Args:
        rewards: float [P, G].
        kept: bool [P, G], which of them count.

    Returns:
        bool [P, 1].
    """
    highest = torch.where(kept, rewards, -torch.inf).amax(dim=1, keepdim=True)
    lowest = torch.where(kept, rewards, torch.inf).amin(dim=1, keepdim=True)
    return highest <= lowest
