"""Losses that compare a better completion with a worse one."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Kind = Literal["sigmoid", "ipo"]


def online_dpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    kind: Kind = "sigmoid",
) -> torch.Tensor:
    """Return the preference loss of each pair.

    With h = (chosen - reference_chosen) - (rejected - reference_rejected)::

        sigmoid    -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h),   s = label_smoothing
        ipo        (h - 1 / (2 beta))^2

    Source: Rafailov et al. 2023 (DPO), arXiv:2305.18290, eq. 7; Mitchell 2023 (conservative DPO, the smoothing); Azar
    et al. 2023 (IPO), arXiv:2310.12036, eq. 17; Guo et al. 2024 (online), arXiv:2402.04792.

    Args:
        chosen: float [B], log-probabilities of whole completions (sums over tokens), with gradient.
        rejected: float [B].
        reference_chosen: float [B].
        reference_rejected: float [B].
        beta: Above 0: how little the policy may leave the reference.
        label_smoothing: Share of pairs that are taken to be the wrong way round, in [0, 0.5); for ``sigmoid`` only.
        kind: Which loss.

    Returns:
        float [B].

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
