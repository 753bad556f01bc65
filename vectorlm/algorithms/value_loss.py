"""The critic's loss, one value per token."""

from __future__ import annotations

import torch


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float | None
) -> torch.Tensor:
    """Return 0.5 max((v - R)^2, (v_old + clip(v - v_old, +-clip_range) - R)^2).

    Source: Schulman et al. 2016 and the reference implementation of PPO (baselines), as used by Ouyang et al. 2022.

    Args:
        values: float [B, T], with gradient.
        old_values: float [B, T], the critic's at the rollout.
        returns: float [B, T], as `gae_advantages` gives them.
        clip_range: Largest useful step of a value; None leaves the clip out.

    Returns:
        float [B, T], unmasked and not reduced.
    """
    returns = returns.detach()
    loss = (values - returns).square()
    if clip_range is not None:
        old_values = old_values.detach()
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        loss = torch.maximum(loss, (clipped - returns).square())
    return 0.5 * loss
