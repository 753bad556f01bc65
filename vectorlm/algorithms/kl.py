"""Estimates of the KL divergence from a reference, and the controller of its weight."""

from __future__ import annotations

from typing import Any, Literal

import torch

from vectorlm.algorithms.ratio import MAX_LOG_RATIO

Kind = Literal["k1", "k2", "k3", "abs"]


def kl_estimate(
    policy_logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    kind: Kind,
    straight_through: bool = False,
) -> torch.Tensor:
    """Estimate KL(policy || reference) from single tokens that the policy sampled.

    With d = policy - reference::

        k1 = d      k2 = d^2 / 2      k3 = exp(-d) - 1 + d      abs = |d|

    k1 and k3 have the right mean; k3 is never negative. As part of a *loss*, k1's gradient has mean zero and does
    nothing, and k3's is not the divergence's; k2's is. `straight_through` gives any of them k2's gradient and leaves
    the value as it is.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; for the gradients Tang and Munos 2025,
    arXiv:2506.09477.

    Args:
        policy_logprobs: float [B, T].
        reference_logprobs: float [B, T].
        kind: Which estimate. d is clamped to +-20 for k3, which exponentiates it.
        straight_through: Whether to replace the gradient by that of k2.

    Returns:
        float [B, T].

    Raises:
        ValueError: `kind` is unknown.
    """
    d = policy_logprobs - reference_logprobs.detach()
    match kind:
        case "k1":
            value = d
        case "k2":
            value = 0.5 * d.square()
        case "k3":
            clamped = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            # Near 0 the terms cancel: expm1 keeps the digits, and what rounding leaves below 0 is none.
            value = (torch.expm1(-clamped) + clamped).clamp(min=0.0)
        case "abs":
            value = d.abs()
        case _:
            raise ValueError(f"kind={kind!r} is unknown: it must be one of k1, k2, k3, abs.")
    if straight_through:
        k2 = 0.5 * d.square()
        return value.detach() + (k2 - k2.detach())
    return value


class AdaptiveKL:
    """Weighs the KL penalty so that the divergence stays near a target.

    ``value *= 1 + clip(kl / target - 1, +-0.2) num_completions / horizon`` after each batch, where a batch of more
    completions than the horizon counts as one of the horizon: the weight never moves by more than a fifth at once.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    def __init__(self, initial: float, target: float, horizon: float) -> None:
        """Start at a weight.

        Args:
            initial: The first weight, at least 0.
            target: The divergence to keep to, above 0.
            horizon: Completions over which the weight may change by a fifth, above 0.

        Raises:
            ValueError: A number is out of its range.
        """
        if initial < 0 or target <= 0 or horizon <= 0:
            raise ValueError(
                f"initial={initial} must be at least 0, target={target} and horizon={horizon} above 0."
            )
        self.value, self.target, self.horizon = float(initial), target, horizon

    def update(self, kl: float, num_completions: int) -> float:
        """Move the weight after a batch of so many completions with this mean divergence; return it."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        # Uncapped, a batch of five horizons would make the weight 0, where it would stay.
        self.value *= 1.0 + error * min(num_completions / self.horizon, 1.0)
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.value = state["value"]
