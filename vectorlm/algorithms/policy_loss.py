"""Policy-gradient losses, one value per token."""

from __future__ import annotations

from typing import Literal

import torch

from vectorlm.algorithms.ratio import exp_clamped, log_ratio, masked_mean, ratio

Level = Literal["token", "sequence"]


def ppo_policy_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    level: Level = "token",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return PPO's clipped surrogate, negated: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    ``level="token"`` takes r = policy / old of each token. ``level="sequence"`` is GSPO: the ratio of a row is the
    geometric mean over its tokens, ``exp(mean log r)``, and each token passes its share of the gradient on.
    `dual_clip` bounds the loss from above by ``-dual_clip A`` where A < 0.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Yu et al. 2025 (DAPO, separate bounds), arXiv:2503.14476;
    Ye et al. 2020 (dual clip), arXiv:1912.09729; Zheng et al. 2025 (GSPO-token), arXiv:2507.18071, eq. 13-14.

    Args:
        policy_logprobs: float [B, T], with gradient.
        old_logprobs: float [B, T], the trainer's own at the weights of the rollout.
        advantages: float [B, T].
        clip_low: Lower bound of the ratio is 1 - clip_low.
        clip_high: Upper bound of the ratio is 1 + clip_high.
        dual_clip: Above 1; None leaves it out.
        level: Whose ratio is clipped.
        mask: bool or 0/1 [B, T], the tokens that a row's ratio is taken over; needed for ``level="sequence"``.

    Returns:
        float [B, T], unmasked and not reduced.

    Raises:
        ValueError: `dual_clip` is not above 1, `level` is unknown, or a sequence ratio has no mask.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip={dual_clip} must be above 1: below, it would bind at a ratio of 1.")
    if level == "sequence":
        ratios = _sequence_ratio(policy_logprobs, old_logprobs, mask)
    elif level == "token":
        ratios = ratio(policy_logprobs, old_logprobs)
    else:
        raise ValueError(f"level={level!r} is unknown: it must be 'token' or 'sequence'.")
    advantages = advantages.detach()
    loss = -torch.minimum(ratios * advantages, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def cispo_policy_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 1.0,
    clip_high: float = 0.2,
) -> torch.Tensor:
    """Return -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy: weights are clipped, no token loses its gradient.

    Source: MiniMax 2025 (CISPO), arXiv:2506.13585, eq. 4-5; the lower bound is 0, that is none, unless set.

    Args:
        policy_logprobs: float [B, T], with gradient.
        old_logprobs: float [B, T].
        advantages: float [B, T].
        clip_low: Lower bound of the weight is 1 - clip_low.
        clip_high: Upper bound of the weight is 1 + clip_high.

    Returns:
        float [B, T], unmasked and not reduced.
    """
    weights = ratio(policy_logprobs, old_logprobs).detach().clamp(1 - clip_low, 1 + clip_high)
    return -weights * advantages.detach() * policy_logprobs


def reinforce_policy_loss(policy_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return -A log policy.

    Source: Williams 1992, Machine Learning 8.

    Args:
        policy_logprobs: float [B, T], with gradient.
        advantages: float [B, T].

    Returns:
        float [B, T], unmasked and not reduced.
    """
    return -advantages.detach() * policy_logprobs


def sapo_policy_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> torch.Tensor:
    """Return -f(r) A with a soft gate in place of the clip: f(r) = sigmoid(tau (r - 1)) 4 / tau.

    At r = 1 the slope of f is 1, so the gradient is that of the plain policy gradient; it fades on both sides, faster
    for a larger tau.

    Source: Gao et al. 2025 (SAPO), arXiv:2511.20347.

    Args:
        policy_logprobs: float [B, T], with gradient.
        old_logprobs: float [B, T].
        advantages: float [B, T].
        temperature_positive: tau where A > 0.
        temperature_negative: tau elsewhere.

    Returns:
        float [B, T], unmasked and not reduced.
    """
    advantages = advantages.detach()
    tau = torch.full_like(advantages, temperature_negative).masked_fill(advantages > 0, temperature_positive)
    gate = torch.sigmoid(tau * (ratio(policy_logprobs, old_logprobs) - 1)) * 4 / tau
    return -gate * advantages


def _sequence_ratio(
    policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return each row's geometric mean ratio at each token; the gradient is that of the token's own ratio."""
    if mask is None:
        raise ValueError("level='sequence' needs the mask: a row's ratio is a mean over its tokens.")
    row = exp_clamped(masked_mean(log_ratio(policy_logprobs, old_logprobs), mask)).detach()
    return row[:, None] * torch.exp(policy_logprobs - policy_logprobs.detach())
