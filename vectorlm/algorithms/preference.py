"""Losses of preferences between completions, computed from log-probabilities of whole completions or from scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from vectorlm.algorithms.kl import log_ratio
from vectorlm.algorithms.settings import PreferenceSettings


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
        rejected: float [B], the policy's log-probabilities of the worse completions.
        reference_chosen: float [B], the reference's log-probabilities of the better completions.
        reference_rejected: float [B], the reference's log-probabilities of the worse completions.
        beta: How strongly the loss keeps the policy near the reference, above 0.
        label_smoothing: Assumed share of mislabelled pairs, in [0, 0.5); for ``sigmoid`` only.
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
            raise ValueError(
                f"label_smoothing={label_smoothing} needs kind='sigmoid'. Leave it at 0 for 'ipo'."
            )
        return (margin - 1 / (2 * beta)).square()
    raise ValueError(f"kind={kind!r} must be 'sigmoid' or 'ipo'.")


def bradley_terry_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor, center_coef: float = 0.0
) -> torch.Tensor:
    """Return the loss of a reward model for each pair, float [B].

        -log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; Touvron et al. 2023 (the margin), arXiv:2307.09288, eq. 2;
    Eisenstein et al. 2023 (the second term, which keeps scores near 0), arXiv:2312.09244, eq. 2.

    Args:
        chosen: float [B], the scores of the better completions.
        rejected: float [B], the scores of the worse completions.
        margins: float [B], target differences of the two scores; 0 for none.
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
    """Return the contrastive policy gradient's loss of each group, float [P]; completions of any policy are allowed.

    With R[i] = rewards[i] - beta (policy[i] - reference[i]):

        loss = sum over pairs i < j of (R[i] - R[j])^2 / (2 beta (n - 1))

    Its gradient is RLOO's with the KL penalty in the reward, ``-(R[i] - mean of the others) grad policy[i]``,
    without any ratio of policies. Completions that are not `valid`, or whose reward is NaN, are in no pair. A group
    with fewer than two other completions has a loss of 0.

    Source: Flet-Berliac et al. 2024, arXiv:2406.19185.

    Raises:
        ValueError: `beta`, the weight of the KL penalty, is not above 0.
    """
    if beta <= 0:
        raise ValueError(f"beta={beta} must be above 0. Without a penalty this loss has no minimum.")
    kept = ~rewards.isnan() if valid is None else valid.bool() & ~rewards.isnan()
    penalised = torch.where(kept, rewards, 0.0) - beta * log_ratio(policy_logprobs, reference_logprobs)
    penalised = torch.where(kept, penalised, 0.0)
    gaps = penalised[:, :, None] - penalised[:, None, :]
    both = kept[:, :, None] & kept[:, None, :]
    others = (kept.sum(dim=1) - 1).clamp(min=1)
    # The matrix holds each pair twice.
    return torch.where(both, gaps.square(), 0.0).sum(dim=(1, 2)) / others / (4 * beta)


def kto_loss(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    is_good: torch.Tensor,
    kl: float | torch.Tensor,
    settings: PreferenceSettings,
    beta: float,
) -> torch.Tensor:
    """Return KTO's loss of completions that are good or bad, float [B].

    With the reward r = beta (logprobs - reference_logprobs) and z = beta `kl`, the divergence from the reference:

        good   desirable_weight (1 - sigmoid(r - z))        bad   undesirable_weight (1 - sigmoid(z - r))

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7 and 8. The paper estimates the KL divergence from
    completions of other prompts; it is at least 0 and has no gradient.
    """
    excess = beta * (logprobs - reference_logprobs - kl)
    good, bad = settings.desirable_weight, settings.undesirable_weight
    return torch.where(is_good, good * torch.sigmoid(-excess), bad * torch.sigmoid(excess))


class PairLogprobs(NamedTuple):
    """Log-probabilities of chosen and rejected completions, float [B] each; 0 if there is no reference."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    reference_chosen: torch.Tensor
    reference_rejected: torch.Tensor


@dataclass(frozen=True)
class PreferenceSpec:
    """A loss of stored pairs."""

    loss: Callable[[PairLogprobs, PreferenceSettings, float], torch.Tensor]
    """Computes float [B] from log-probabilities, settings and beta."""
    source: str
    needs_reference: bool = True
    averages: bool = False
    """Whether log-probabilities are divided by their number of tokens, unless `length_normalised` is set."""
    beta: float = 0.1
    """Initial value of `beta`."""


def hinge(pairs: PairLogprobs, settings: PreferenceSettings, beta: float) -> torch.Tensor:
    """Return max(0, 1 - beta h), with h as in `online_dpo_loss`."""
    margin = (pairs.chosen - pairs.reference_chosen) - (pairs.rejected - pairs.reference_rejected)
    return F.relu(1 - beta * margin)


def orpo(pairs: PairLogprobs, settings: PreferenceSettings, beta: float) -> torch.Tensor:
    """Return -chosen - beta log sigmoid(log odds of chosen - log odds of rejected), of mean log-probabilities."""

    def log_odds(logprobs: torch.Tensor) -> torch.Tensor:
        # The odds of a probability of 1 are infinite.
        return logprobs - torch.log(-torch.expm1(logprobs.clamp(max=-1e-6)))

    return -pairs.chosen - beta * F.logsigmoid(log_odds(pairs.chosen) - log_odds(pairs.rejected))


PAIR_LOSSES: Mapping[str, PreferenceSpec] = {
    "dpo": PreferenceSpec(
        lambda pairs, settings, beta: online_dpo_loss(*pairs, beta, settings.label_smoothing),
        "Rafailov et al. 2023, arXiv:2305.18290, eq. 7; Mitchell 2023 (the smoothing)",
    ),
    "ipo": PreferenceSpec(
        lambda pairs, settings, beta: online_dpo_loss(*pairs, beta, kind="ipo"),
        "Azar et al. 2023, arXiv:2310.12036, eq. 17",
        averages=True,
    ),
    "hinge": PreferenceSpec(
        hinge, "Zhao et al. 2023 (SLiC), arXiv:2305.10425; Liu et al. 2023, arXiv:2309.06657"
    ),
    # -log sigmoid(beta (chosen - rejected) - gamma), of mean log-probabilities.
    "simpo": PreferenceSpec(
        lambda pairs, settings, beta: -F.logsigmoid(beta * (pairs.chosen - pairs.rejected) - settings.gamma),
        "Meng et al. 2024, arXiv:2405.14734, eq. 6",
        needs_reference=False,
        averages=True,
        beta=2.0,
    ),
    "orpo": PreferenceSpec(
        orpo, "Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7", needs_reference=False, averages=True
    ),
}
"""Losses of pairs by name. (`kto` learns from single completions.)"""
KTO_BETA = 0.1
