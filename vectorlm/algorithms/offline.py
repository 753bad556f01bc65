"""Losses of preference data as rows: how each makes a number of a pair's log-probabilities, or of a completion's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vectorlm.algorithms.preference import online_dpo_loss
from vectorlm.algorithms.settings import PreferenceSettings


@dataclass(frozen=True)
class PairLogprobs:
    """The log-probabilities of chosen and rejected completions, float [B] each; 0 of a reference that is not there."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    reference_chosen: torch.Tensor
    reference_rejected: torch.Tensor

    @property
    def margin(self) -> torch.Tensor:
        """By how much the policy's log-ratio of the two is above the reference's."""
        return (self.chosen - self.reference_chosen) - (self.rejected - self.reference_rejected)


@dataclass(frozen=True)
class PreferenceSpec:
    """One loss of pairs."""

    loss: Callable[[PairLogprobs, PreferenceSettings, float], torch.Tensor]
    """From log-probabilities, settings and beta to float [B]."""
    source: str
    needs_reference: bool = True
    averages: bool = False
    """Whether log-probabilities are divided by the number of their tokens, unless the settings say otherwise."""
    beta: float = 0.1
    """Where `beta` starts."""


def dpo(pairs: PairLogprobs, settings: PreferenceSettings, beta: float) -> torch.Tensor:
    """Return -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), with s = `label_smoothing`."""
    references = (pairs.reference_chosen, pairs.reference_rejected)
    return online_dpo_loss(pairs.chosen, pairs.rejected, *references, beta, settings.label_smoothing)


def ipo(pairs: PairLogprobs, settings: PreferenceSettings, beta: float) -> torch.Tensor:
    """Return (h - 1 / (2 beta))^2."""
    references = (pairs.reference_chosen, pairs.reference_rejected)
    return online_dpo_loss(pairs.chosen, pairs.rejected, *references, beta, kind="ipo")


def hinge(pairs: PairLogprobs, settings: PreferenceSettings, beta: float) -> torch.Tensor:
    """Return max(0, 1 - beta h)."""
    return F.relu(1 - beta * pairs.margin)


def simpo(pairs: PairLogprobs, settings: PreferenceSettings, beta: float) -> torch.Tensor:
    """Return -log sigmoid(beta (chosen - rejected) - gamma), of mean log-probabilities."""
    return -F.logsigmoid(beta * (pairs.chosen - pairs.rejected) - settings.gamma)


def orpo(pairs: PairLogprobs, settings: PreferenceSettings, beta: float) -> torch.Tensor:
    """Return -chosen - beta log sigmoid(log odds of chosen - log odds of rejected), of mean log-probabilities."""

    def log_odds(logprobs: torch.Tensor) -> torch.Tensor:
        # A probability of 1 has odds without end.
        return logprobs - torch.log(-torch.expm1(logprobs.clamp(max=-1e-6)))

    return -pairs.chosen - beta * F.logsigmoid(log_odds(pairs.chosen) - log_odds(pairs.rejected))


def kto_loss(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    is_good: torch.Tensor,
    kl: float | torch.Tensor,
    settings: PreferenceSettings,
    beta: float,
) -> torch.Tensor:
    """Return the loss of completions that are good or bad, float [B].

    With the reward r = beta (logprobs - reference_logprobs) and z = beta `kl`, the divergence from the reference:

        desirable_weight (1 - sigmoid(r - z)) of a good one,   undesirable_weight (1 - sigmoid(z - r)) of a bad one

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7 and 8; its KL divergence is estimated from completions of
    other prompts, is at least 0 and has no gradient.
    """
    excess = beta * (logprobs - reference_logprobs - kl)
    good, bad = settings.desirable_weight, settings.undesirable_weight
    return torch.where(is_good, good * torch.sigmoid(-excess), bad * torch.sigmoid(excess))


PAIR_LOSSES: Mapping[str, PreferenceSpec] = {
    "dpo": PreferenceSpec(
        dpo, "Rafailov et al. 2023, arXiv:2305.18290, eq. 7; Mitchell 2023 (the smoothing)"
    ),
    "ipo": PreferenceSpec(ipo, "Azar et al. 2023, arXiv:2310.12036, eq. 17", averages=True),
    "hinge": PreferenceSpec(
        hinge, "Zhao et al. 2023 (SLiC), arXiv:2305.10425; Liu et al. 2023, arXiv:2309.06657"
    ),
    "simpo": PreferenceSpec(
        simpo, "Meng et al. 2024, arXiv:2405.14734, eq. 6", needs_reference=False, averages=True, beta=2.0
    ),
    "orpo": PreferenceSpec(
        orpo, "Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7", needs_reference=False, averages=True
    ),
}
"""The losses of pairs by name; `kto` learns from single completions."""
KTO_BETA = 0.1
