"""Generalised advantage estimation from a critic's values, and the critic's loss."""

from __future__ import annotations

import torch


def gae_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the advantage and the return of each token; the return is the target of the critic.

    With t' the next token in the mask, and V = A = 0 after the last one:

        delta[t] = rewards[t] + gamma values[t'] - values[t]
        advantages[t] = delta[t] + gamma lam advantages[t']
        returns[t] = advantages[t] + values[t]

    Tokens outside the mask are skipped, not treated as steps of value zero: a tool's text between two turns does not
    discount earlier tokens. Advantages are not whitened; see `whiten`.

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 11 and 16.

    Args:
        rewards: float [B, T]; not read outside the mask.
        values: float [B, T], the critic's value of the state in which the token was sampled.
        mask: bool or 0/1 [B, T], the tokens that the policy sampled.
        gamma: Discount per token, in [0, 1].
        lam: Lambda, in [0, 1]: 0 trusts the critic, 1 the rewards.

    Returns:
        Advantages and returns, float [B, T], detached, 0 outside the mask.
    """
    kept = mask.bool()
    rewards, values = rewards.detach(), values.detach()
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    next_value, next_advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        here = kept[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_advantage = torch.where(here, advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, advantage, advantages[:, t])
        returns[:, t] = torch.where(here, advantage + values[:, t], returns[:, t])
    return advantages, returns


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float | None
) -> torch.Tensor:
    """Return 0.5 max((v - R)^2, (v_old + clip(v - v_old, +-clip_range) - R)^2), float [B, T], not masked.

    `values` carry the gradient. `old_values` are the critic's values before the first optimizer step on the batch.
    `clip_range=None` does not clip.

    Source: Schulman et al. 2016 and the reference implementation of PPO (baselines), as used by Ouyang et al. 2022.
    """
    returns = returns.detach()
    loss = (values - returns).square()
    if clip_range is not None:
        old_values = old_values.detach()
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        loss = torch.maximum(loss, (clipped - returns).square())
    return 0.5 * loss
