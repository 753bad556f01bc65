"""The numbers that an algorithm's functions read, and where they start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vectorlm.settings import NonNegativeFloat, PositiveFloat, UnitInterval

Reduction = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_sum_fixed"]


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What a config may set, else the algorithm's own `AlgorithmSpec.settings`, else the default here."""

    reduction: Reduction = "token_mean"
    """How the losses of tokens become one number."""
    whiten_advantages: bool = False
    """Bring advantages to mean 0 and standard deviation 1 over the batch."""
    dynamic_sampling: bool = False
    """Drop groups of equal rewards and sample others in their place."""
    gamma: UnitInterval = 1.0
    """Discount per token."""
    lam: UnitInterval = 1.0
    """Lambda of generalised advantage estimation."""
    clip_low: NonNegativeFloat = 0.2
    """The ratio of policies is clipped to at least 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio of policies is clipped to at most 1 + clip_high."""
    dual_clip: PositiveFloat | None = None
    """Bound of the loss where the advantage is negative, above 1; without one it is unbounded there."""
    beta: PositiveFloat = 0.1
    """Strength with which a preference loss or CoPG keeps the policy near the reference."""
    label_smoothing: UnitInterval = 0.0
    """Share of pairs that the preference loss assumes to be labelled the wrong way round."""
    preference: Literal["sigmoid", "ipo"] = "sigmoid"
    """The preference loss of online DPO."""
    temperature_positive: PositiveFloat = 1.0
    """SAPO's temperature where the advantage is positive."""
    temperature_negative: PositiveFloat = 1.05
    """SAPO's temperature where the advantage is negative."""
