"""Which completions of a group are trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Selection:
    """The completions that were chosen of each group."""

    columns: torch.Tensor
    """int64 [P, K], indices into the group."""
    valid: torch.Tensor
    """bool [P, K]; what is not valid has no part in any loss."""


def keep_all(rewards: torch.Tensor, valid: torch.Tensor) -> Selection:
    """Choose every completion.

    Args:
        rewards: float [P, G]; NaN marks a completion that could not be scored.
        valid: bool [P, G].

    Returns:
        K = G; valid are those that were and have a reward.
    """
    num_groups, group_size = rewards.shape
    columns = torch.arange(group_size, device=rewards.device).expand(num_groups, group_size)
    return Selection(columns, valid & ~rewards.isnan())


def keep_best(rewards: torch.Tensor, valid: torch.Tensor) -> Selection:
    """Choose the completion with the highest reward, the first of equals.

    Args:
        rewards: float [P, G]; NaN marks a completion that could not be scored.
        valid: bool [P, G].

    Returns:
        K = 1.
    """
    kept = valid & ~rewards.isnan()
    best = torch.where(kept, rewards, -torch.inf).argmax(dim=1, keepdim=True)
    return Selection(best, kept.gather(1, best))


def keep_best_and_worst(rewards: torch.Tensor, valid: torch.Tensor) -> Selection:
    """Choose the completions with the highest and with the lowest reward, in this order.

    Args:
        rewards: float [P, G]; NaN marks a completion that could not be scored.
        valid: bool [P, G].

    Returns:
        K = 2; a pair of equal rewards says nothing and is not valid.
    """
    kept = valid & ~rewards.isnan()
    best = torch.where(kept, rewards, -torch.inf).argmax(dim=1, keepdim=True)
    worst = torch.where(kept, rewards, torch.inf).argmin(dim=1, keepdim=True)
    columns = torch.cat([best, worst], dim=1)
    differ = kept.gather(1, best) & (rewards.gather(1, best) > rewards.gather(1, worst))
    return Selection(columns, differ.expand(-1, 2))
