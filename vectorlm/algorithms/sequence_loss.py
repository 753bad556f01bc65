"""Losses of whole completions, by the probability of all their tokens together."""

from __future__ import annotations

import torch

from vectorlm.algorithms.ratio import exp_clamped, log_ratio, masked_sum


def proximal_rloo_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> torch.Tensor:
    """Return PPO's clipped surrogate with a completion as the action: r = exp(sum of its tokens' log-ratios).

    Source: Noukhovitch et al. 2024, arXiv:2410.18252 (Proximal RLOO).

    Args:
        policy_logprobs: float [B, T], with gradient.
        old_logprobs: float [B, T].
        advantages: float [B], as `leave_one_out_advantages` gives them.
        mask: bool or 0/1 [B, T], the completions' tokens.
        clip_low: Lower bound of the ratio is 1 - clip_low.
        clip_high: Upper bound of the ratio is 1 + clip_high.

    Returns:
        float [B], one value per completion.
    """
    ratios = exp_clamped(masked_sum(log_ratio(policy_logprobs, old_logprobs), mask))
    advantages = advantages.detach()
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages)


def copg_loss(
    policy_logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    rewards: torch.Tensor,
    beta: float,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the contrastive policy gradient's loss of each group, right for completions of any policy.

    With R[i] = rewards[i] - beta (policy[i] - reference[i])::

        loss = sum over pairs i < j of (R[i] - R[j])^2 / (2 beta (n - 1))

    Its gradient is that of RLOO with the KL penalty in the reward, ``-(R[i] - mean of the others) grad policy[i]``,
    without any ratio of policies.

    Source: Flet-Berliac et al. 2024, arXiv:2406.19185.

    Args:
        policy_logprobs: float [P, G], of whole completions (sums over tokens), with gradient.
        reference_logprobs: float [P, G].
        rewards: float [P, G]; NaN marks a completion that could not be scored.
        beta: Weight of the KL penalty, above 0.
        valid: bool [P, G]; completions that are not valid are in no pair.

    Returns:
        float [P]; 0 for a group with fewer than two completions left.

    Raises:
        ValueError: `beta` is not above 0.
    """
    if beta <= 0:
        raise ValueError(f"beta={beta} must be above 0: without a penalty this loss has no minimum.")
    kept = ~rewards.isnan() if valid is None else valid.bool() & ~rewards.isnan()
    penalised = torch.where(kept, rewards, 0.0) - beta * log_ratio(policy_logprobs, reference_logprobs)
    penalised = torch.where(kept, penalised, 0.0)
    gaps = penalised[:, :, None] - penalised[:, None, :]
    both = kept[:, :, None] & kept[:, None, :]
    others = (kept.sum(dim=1) - 1).clamp(min=1)
    # Each pair stands in the matrix twice.
    return torch.where(both, gaps.square(), 0.0).sum(dim=(1, 2)) / others / (4 * beta)
