"""Losses of the policy: one value per token, completion, or group of completions.

`policy_logprobs` float [B, T] carry the gradient; `old_logprobs` [B, T] are the trainer's at the weights of the
rollout; A are the `advantages` [B, T], and r = policy / old. `mask`, bool or 0/1 [B, T], marks the tokens that the
policy chose. Every loss is float [B, T], unmasked and not reduced, unless it says otherwise. The last two take
log-probabilities of whole completions: sums over their tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from vectorlm.algorithms.kl import exp_clamped, log_ratio, ratio
from vectorlm.algorithms.reduce import masked_mean, masked_sum


def ppo_policy_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    level: Literal["token", "sequence"] = "token",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return PPO's clipped surrogate, negated: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    ``level="token"`` takes r = policy / old of each token. ``level="sequence"`` is GSPO: the ratio of a row is the
    geometric mean over its tokens in `mask`, ``exp(mean log r)``, and the gradient flows through each token's own
    ratio. `dual_clip`, above 1, bounds the loss from above by ``-dual_clip A`` where A < 0.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Yu et al. 2025 (DAPO, separate bounds), arXiv:2503.14476;
    Ye et al. 2020 (dual clip), arXiv:1912.09729; Zheng et al. 2025 (GSPO-token), arXiv:2507.18071, eq. 13-14.

    Raises:
        ValueError: `dual_clip` is not above 1, `level` is unknown, or a sequence ratio has no mask.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip={dual_clip} must be above 1: a lower one bounds the loss at ratio 1.")
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

    Source: MiniMax 2025 (CISPO), arXiv:2506.13585, eq. 4-5; the default has no lower bound.
    """
    weights = ratio(policy_logprobs, old_logprobs).detach().clamp(1 - clip_low, 1 + clip_high)
    return -weights * advantages.detach() * policy_logprobs


def reinforce_policy_loss(policy_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return -A log policy.

    Source: Williams 1992, Machine Learning 8.
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

    tau is `temperature_positive` where A > 0, else `temperature_negative`. At r = 1 the slope of f is 1, so the
    gradient is the plain policy gradient; it fades on both sides, faster for a larger tau.

    Source: Gao et al. 2025 (SAPO), arXiv:2511.20347.
    """
    advantages = advantages.detach()
    tau = torch.full_like(advantages, temperature_negative).masked_fill(advantages > 0, temperature_positive)
    gate = torch.sigmoid(tau * (ratio(policy_logprobs, old_logprobs) - 1)) * 4 / tau
    return -gate * advantages


def proximal_rloo_loss(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> torch.Tensor:
    """Return PPO's clipped surrogate with a completion as the action: r = exp(sum of its tokens' log-ratios).

    `advantages` are float [B], as `leave_one_out_advantages` gives them, and so is the result.

    Source: Noukhovitch et al. 2024, arXiv:2410.18252 (Proximal RLOO).
    """
    ratios = exp_clamped(masked_sum(log_ratio(policy_logprobs, old_logprobs), mask))
    advantages = advantages.detach()
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages)


def online_dpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
) -> torch.Tensor:
    """Return the preference loss of each pair, float [B].

    With h = (chosen - reference_chosen) - (rejected - reference_rejected)::

        sigmoid    -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h),   s = label_smoothing
        ipo        (h - 1 / (2 beta))^2

    Source: Rafailov et al. 2023 (DPO), arXiv:2305.18290, eq. 7; Mitchell 2023 (conservative DPO, the smoothing); Azar
    et al. 2023 (IPO), arXiv:2310.12036, eq. 17; Guo et al. 2024 (online), arXiv:2402.04792.

    Args:
        chosen, rejected: float [B], the policy's log-probabilities of the better and the worse completions.
        reference_chosen, reference_rejected: float [B], the reference's.
        beta: Strength with which the policy is kept near the reference, above 0.
        label_smoothing: Assumed share of wrongly labelled pairs, in [0, 0.5); for ``sigmoid`` only.
        kind: ``sigmoid`` or ``ipo``.

    Raises:
        ValueError: `kind` is unknown, or a number is out of its range.
    """
    if beta <= 0 or not 0 <= label_smoothing < 0.5:
        raise ValueError(f"beta={beta} must be above 0 and label_smoothing={label_smoothing} in [0, 0.5).")
    margin = (chosen - reference_chosen.detach()) - (rejected - reference_rejected.detach())
    if kind == "sigmoid":
        right, wrong = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
        return -(1 - label_smoothing) * right - label_smoothing * wrong
    if kind == "ipo":
        if label_smoothing:
            raise ValueError("label_smoothing belongs to kind='sigmoid': leave it at 0 for 'ipo'.")
        return (margin - 1 / (2 * beta)).square()
    raise ValueError(f"kind={kind!r} is unknown: it must be 'sigmoid' or 'ipo'.")


def copg_loss(
    policy_logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    rewards: torch.Tensor,
    beta: float,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the contrastive policy gradient's loss of each group, float [P]; right for completions of any policy.

    With R[i] = rewards[i] - beta (policy[i] - reference[i])::

        loss = sum over pairs i < j of (R[i] - R[j])^2 / (2 beta (n - 1))

    Its gradient is RLOO's with the KL penalty in the reward, ``-(R[i] - mean of the others) grad policy[i]``,
    without any ratio of policies. A completion that is not `valid`, or has a reward of NaN, is in no pair; a group with
    fewer than two completions left has a loss of 0.

    Source: Flet-Berliac et al. 2024, arXiv:2406.19185.

    Raises:
        ValueError: `beta`, the weight of the KL penalty, is not above 0.
    """
    if beta <= 0:
        raise ValueError(f"beta={beta} must be above 0: without a penalty this loss has no minimum.")
    kept = ~rewards.isnan() if valid is None else valid.bool() & ~rewards.isnan()
    penalised = torch.where(kept, rewards, 0.0) - beta * log_ratio(policy_logprobs, reference_logprobs)
    penalised = torch.where(kept, penalised, 0.0)
    gaps = penalised[:, :, None] - penalised[:, None, :]
    both = kept[:, :, None] & kept[:, None, :]
    others = (kept.sum(dim=1) - 1).clamp(min=1)
    # The matrix holds each pair twice.
    return torch.where(both, gaps.square(), 0.0).sum(dim=(1, 2)) / others / (4 * beta)


def _sequence_ratio(
    policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return each row's geometric mean ratio at each token; the gradient is the token's own."""
    if mask is None:
        raise ValueError("level='sequence' needs the mask: a row's ratio is a mean over its tokens.")
    row = exp_clamped(masked_mean(log_ratio(policy_logprobs, old_logprobs), mask)).detach()
    return row[:, None] * torch.exp(policy_logprobs - policy_logprobs.detach())
