"""Losses that compare completions of a prompt by the log-probabilities of whole completions: sums over tokens."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from vectorlm.algorithms.kl import log_ratio


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

    With h = (chosen - reference_chosen) - (rejected - reference_rejected):

        sigmoid    -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h),   s = label_smoothing
        ipo        (h - 1 / (2 beta))^2

    Source: Rafailov et al. 2023 (DPO), arXiv:2305.18290, eq. 7; Mitchell 2023 (conservative DPO, the smoothing); Azar
    et al. 2023 (IPO), arXiv:2310.12036, eq. 17; Guo et al. 2024 (online), arXiv:2402.04792.

    Args:
        chosen: float [B], the policy's log-probabilities of the better completions.
        rejected: float [B], those of the worse ones.
        reference_chosen: float [B], the reference's log-probabilities of the better completions.
        reference_rejected: float [B], those of the worse ones.
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


def bradley_terry_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor, center_coef: float = 0.0
) -> torch.Tensor:
    """Return the loss of a reward model's scores of each pair, float [B].

        -log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; Touvron et al. 2023 (the margin), arXiv:2307.09288, eq. 2;
    Eisenstein et al. 2023 (the second term, which keeps scores near 0), arXiv:2312.09244, eq. 2.

    Args:
        chosen: float [B], the scores of the better completions.
        rejected: float [B], those of the worse ones.
        margins: float [B], by how much the one is to be above the other; 0 for none.
        center_coef: Weight of the second term, at least 0.
    """
    loss = -F.logsigmoid(chosen - rejected - margins)
    return loss + center_coef * (chosen + rejected).square() if center_coef else loss


def copg_loss(
    policy_logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    rewards: torch.Tensor,
    beta: float,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the contrastive policy gradient's loss of each group, float [P]; right for completions of any policy.

    With R[i] = rewards[i] - beta (policy[i] - reference[i]):

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
