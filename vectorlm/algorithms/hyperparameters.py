"""The numbers that an algorithm's functions read, and where they start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vectorlm.settings import NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval

Reduction = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_sum_fixed"]

ImportanceLevel = Literal["token", "sequence"]
RewardScale = Literal["group", "batch", "none"]


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What a config may set, else the algorithm's own `AlgorithmSpec.settings`, else the default here."""

    reduction: Reduction = "token_mean"
    """How the losses of tokens become one number."""
    whiten_advantages: bool = False
    """Bring advantages to mean 0 and standard deviation 1 over the batch."""
    dynamic_sampling: bool = False
    """Drop groups of equal rewards and sample others in their place."""
    scale_rewards: RewardScale = "group"
    """What the advantages of a group are divided by: the deviation of its rewards, or of the batch's, or nothing."""
    pass_k: PositiveInt = 4
    """Completions of which the best counts, with `pass_at_k`; below `group_size`."""
    importance_sampling_level: ImportanceLevel = "token"
    """Whether the loss has the ratio of each token, or of each completion, by the mean of its log-ratios."""
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
    divergence_bound: PositiveFloat = 0.15
    """DPPO's bound: of |p - q| with `dppo_tv`, of nats with `dppo_kl`."""
    shape_positive: NonNegativeFloat = 2.0
    """VESPO's exponent of a ratio where the advantage is not negative; larger fades small ratios faster."""
    rate_positive: PositiveFloat = 3.0
    """VESPO's rate where the advantage is not negative; larger fades large ratios faster."""
    shape_negative: NonNegativeFloat = 3.0
    """VESPO's exponent where the advantage is negative."""
    rate_negative: PositiveFloat = 2.0
    """VESPO's rate where the advantage is negative."""
    covariance_share: UnitInterval = 0.0002
    """Share of tokens that `clip_cov` keeps from learning and `kl_cov` penalises."""
    covariance_low: NonNegativeFloat = 1.0
    """Covariance of advantage and log-probability above which `clip_cov` draws tokens."""
    covariance_high: PositiveFloat = 5.0
    """Covariance of advantage and log-probability below which `clip_cov` draws tokens."""
    covariance_kl_coef: NonNegativeFloat = 1.0
    """Weight of the penalty of `kl_cov`."""
