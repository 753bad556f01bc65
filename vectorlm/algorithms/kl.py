"""Ratios and divergences of two policies, and the adaptive weight of the KL penalty."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

KLKind = Literal["k1", "k2", "k3", "abs"]
BinaryKind = Literal["tv", "bernoulli_kl"]

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios, of a token or summed over a row, before they are exponentiated: e^20 is 5e8."""


def log_ratio(policy_logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Return log(policy / other), detached from `other`, not clamped."""
    return policy_logprobs - other_logprobs.detach()


def ratio(policy_logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Return policy / other of each token [B, T], clamped; a clamped ratio has no gradient."""
    return exp_clamped(log_ratio(policy_logprobs, other_logprobs))


def exp_clamped(log_ratios: torch.Tensor) -> torch.Tensor:
    """Exponentiate log-ratios clamped to +- `MAX_LOG_RATIO`."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(
    policy_logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    kind: KLKind,
    straight_through: bool = False,
) -> torch.Tensor:
    """Estimate KL(policy || reference) from single tokens that the policy sampled, float [B, T].

    With d = policy - reference:

        k1 = d      k2 = d^2 / 2      k3 = exp(-d) - 1 + d      abs = |d|

    k1 and k3 are unbiased; k3 is never negative. If exp(-d) overflows (d < -88 in float32), k3 keeps the value and the
    gradient that it has at that bound. As a *loss*, k1 has a gradient with mean zero, and only k2 has the gradient of
    the divergence. `straight_through` keeps the value and replaces the gradient by k2's.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; for the gradients Tang and Munos 2025,
    arXiv:2506.09477.
    """
    d = policy_logprobs - reference_logprobs.detach()
    match kind:
        case "k1":
            value = d
        case "k2":
            value = 0.5 * d.square()
        case "k3":
            lowest = 0.7 - math.log(torch.finfo(d.dtype).max)
            # A clamp would have no gradient: the penalty would vanish for the tokens that need it most.
            d = torch.where(d < lowest, lowest + d - d.detach(), d)
            # Near 0 the terms cancel: expm1 keeps the digits, and rounding can give a result below 0.
            value = (torch.expm1(-d) + d).clamp(min=0.0)
        case "abs":
            value = d.abs()
        case _:
            raise ValueError(f"kind={kind!r} must be one of k1, k2, k3, abs.")
    if straight_through:
        k2 = 0.5 * d.square()
        return value.detach() + (k2 - k2.detach())
    return value


def binary_divergence(
    policy_logprobs: torch.Tensor, other_logprobs: torch.Tensor, kind: BinaryKind
) -> torch.Tensor:
    """Return the divergence of other from policy for one event, sampling this token; float [B, T], no gradient.

    With q the other's probability of the token and p the policy's:

        tv   |p - q|      bernoulli_kl   q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    The result is a lower bound of the divergence over the vocabulary.
    """
    policy, other = policy_logprobs.detach(), other_logprobs.detach()
    if kind == "tv":
        return (policy.exp() - other.exp()).abs()
    # A probability of 1 is rounded. The rest is half a rounding step: 0 would give an infinite divergence.
    dtype = torch.promote_types(policy.dtype, other.dtype)
    largest = -0.5 * torch.finfo(dtype).eps
    policy, other = (logprobs.double().where(logprobs < 0, largest) for logprobs in (policy, other))
    log_ratios_of_rest = torch.log(torch.expm1(policy) / torch.expm1(other))
    log_ratios = (policy - other).masked_fill(other == -torch.inf, 0.0)
    divergence = torch.expm1(other) * log_ratios_of_rest - other.exp() * log_ratios
    # Rounding can make the difference of two close numbers a little less than 0.
    return divergence.clamp(min=0.0).to(dtype)


def generalised_jsd(
    policy_logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return the generalised Jensen-Shannon divergence of two distributions over the vocabulary, float [N].

    With the mixture M = beta teacher + (1 - beta) policy:

        beta KL(teacher || M) + (1 - beta) KL(policy || M)
        KL(teacher || policy) at beta = 0      KL(policy || teacher) at beta = 1

    The first formula is 0 at both ends. Divided by beta, or by 1 - beta, it tends to the two divergences below it.

    Source: Agarwal et al. 2023 (GKD), arXiv:2306.13649, eq. 1 and section 2.

    Args:
        policy_logprobs: float [N, V], with gradient.
        teacher_logprobs: float [N, V], detached here.
        beta: 0 to 1.
    """
    teacher_logprobs = teacher_logprobs.detach()
    if beta == 0:
        return _mean_log_ratio(teacher_logprobs, policy_logprobs)
    if beta == 1:
        return _mean_log_ratio(policy_logprobs, teacher_logprobs)
    # logaddexp of -inf and -inf has the gradient NaN. This bound is below every probability above 0.
    of_teacher = (teacher_logprobs + math.log(beta)).clamp_(min=-1e4)
    mixture = torch.logaddexp(of_teacher, policy_logprobs + math.log1p(-beta))
    of_teacher, of_policy = (
        _mean_log_ratio(logprobs, mixture) for logprobs in (teacher_logprobs, policy_logprobs)
    )
    return beta * of_teacher + (1 - beta) * of_policy


def _mean_log_ratio(logprobs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return KL(logprobs || others), float [N]."""
    # A token of probability 0 must add 0, not 0 times -inf, to the value and to the gradient.
    ratios = (logprobs - others).masked_fill(logprobs == -torch.inf, 0.0)
    return (logprobs.exp() * ratios).sum(dim=-1)


class AdaptiveKL:
    """A weight of the KL penalty that adapts to keep the divergence near a target.

    ``value *= 1 + clip(kl / target - 1, +-0.2) min(num_completions / horizon, 1)`` after each batch.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    def __init__(self, initial: float, target: float, horizon: float) -> None:
        """Start with the weight `initial` >= 0; `target` and `horizon` must be above 0 (ValueError)."""
        if initial < 0 or target <= 0 or horizon <= 0:
            raise ValueError(
                f"initial={initial} must be at least 0, target={target} and horizon={horizon} above 0."
            )
        self.initial = self.value = float(initial)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, num_completions: int) -> float:
        """Update the weight after a batch with this mean divergence, and return it."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        # Without min(), a batch of five horizons could set the weight to 0 for good.
        self.value *= 1.0 + error * min(num_completions / self.horizon, 1.0)
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"initial": self.initial, "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`, unless it began with another weight."""
        if state.get("initial", self.initial) == self.initial:
            self.value = state["value"]
