"""The settings of each algorithm: what its functions read, and where it starts.

A class names the settings that one function or loop reads; a row of the table is made of those that its algorithm uses.
Nothing here imports torch, which reading a config does without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from vectorlm.settings import NonNegativeFloat, PositiveFloat, PositiveInt, ReadIf, UnitInterval

Reduction = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_sum_fixed"]
ImportanceLevel = Literal["token", "sequence"]
RewardScale = Literal["group", "batch", "none"]
AboveOne = Annotated[float, Field(gt=1, lt=math.inf, description="a finite number > 1", examples=["3.0"])]
BelowHalf = Annotated[float, Field(ge=0, lt=0.5, description="a number >= 0 and < 0.5", examples=["0.1"])]


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """What every algorithm has."""

    dynamic_sampling: bool = False
    """Drop groups of equal rewards and sample others in their place."""


@dataclass(frozen=True, kw_only=True)
class ReductionSettings(AlgorithmSettings):
    """Of losses with a value for each token."""

    reduction: Reduction = "token_mean"
    """How the losses of tokens become one number."""


@dataclass(frozen=True, kw_only=True)
class WhiteningSettings(AlgorithmSettings):
    """Of advantages whose size the policy learns from."""

    whiten_advantages: bool = False
    """Bring advantages to mean 0 and standard deviation 1 over the batch."""


@dataclass(frozen=True, kw_only=True)
class TokenSettings(ReductionSettings, WhiteningSettings):
    """Of algorithms with an advantage and a loss for each token, and no settings of their own."""


@dataclass(frozen=True, kw_only=True)
class ScaleSettings(AlgorithmSettings):
    """Of advantages against the group."""

    scale_rewards: RewardScale = "group"
    """What the advantages of a group are divided by: the deviation of its rewards, or of the batch's, or nothing."""


@dataclass(frozen=True, kw_only=True)
class LevelSettings(AlgorithmSettings):
    """Of losses with a ratio of tokens or completions."""

    importance_sampling_level: ImportanceLevel = "token"
    """Whether the loss has the ratio of each token, or of each completion, by the mean of its log-ratios."""


@dataclass(frozen=True, kw_only=True)
class ClipSettings(AlgorithmSettings):
    """Of losses whose ratio is clipped."""

    clip_low: NonNegativeFloat = 0.2
    """The ratio of policies is clipped to at least 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio of policies is clipped to at most 1 + clip_high."""


@dataclass(frozen=True, kw_only=True)
class SurrogateSettings(ClipSettings, LevelSettings):
    """Of PPO's clipped surrogate."""

    dual_clip: AboveOne | None = None
    """Bound of the loss where the advantage is negative; without one it is unbounded there."""


@dataclass(frozen=True, kw_only=True)
class PPOSettings(TokenSettings, SurrogateSettings):
    """PPO's, from a critic's values."""

    gamma: UnitInterval = 1.0
    """Discount per token."""
    lam: UnitInterval = 1.0
    """Lambda of generalised advantage estimation."""


@dataclass(frozen=True, kw_only=True)
class ClippedSettings(TokenSettings, SurrogateSettings):
    """Of PPO's surrogate with other advantages than PPO's."""


@dataclass(frozen=True, kw_only=True)
class GRPOSettings(ClippedSettings, ScaleSettings):
    """GRPO's, and of what is made of it."""


@dataclass(frozen=True, kw_only=True)
class CISPOSettings(TokenSettings, ScaleSettings, ClipSettings, LevelSettings):
    """CISPO's."""


@dataclass(frozen=True, kw_only=True)
class SAPOSettings(TokenSettings, ScaleSettings, LevelSettings):
    """SAPO's."""

    temperature_positive: PositiveFloat = 1.0
    """SAPO's temperature where the advantage is positive."""
    temperature_negative: PositiveFloat = 1.05
    """SAPO's temperature where the advantage is negative."""


@dataclass(frozen=True, kw_only=True)
class PassAtKSettings(ClippedSettings):
    """Pass@k's."""

    pass_k: PositiveInt = 4
    """Completions of which the best counts; below `group_size`."""


@dataclass(frozen=True, kw_only=True)
class GMPOSettings(WhiteningSettings, ScaleSettings, ClipSettings):
    """GMPO's."""


@dataclass(frozen=True, kw_only=True)
class CovarianceSettings(AlgorithmSettings):
    """Of algorithms that treat tokens of high covariance differently."""

    covariance_share: UnitInterval = 0.0002
    """Share of tokens that `clip_cov` keeps from learning and `kl_cov` penalises."""


@dataclass(frozen=True, kw_only=True)
class ClipCovSettings(GRPOSettings, CovarianceSettings):
    """Clip-Cov's."""

    covariance_low: NonNegativeFloat = 1.0
    """Covariance of advantage and log-probability above which `clip_cov` draws tokens."""
    covariance_high: PositiveFloat = 5.0
    """Covariance of advantage and log-probability below which `clip_cov` draws tokens."""


@dataclass(frozen=True, kw_only=True)
class KLCovSettings(TokenSettings, ScaleSettings, CovarianceSettings):
    """KL-Cov's."""

    covariance_kl_coef: NonNegativeFloat = 1.0
    """Weight of the penalty of `kl_cov`."""


@dataclass(frozen=True, kw_only=True)
class DPPOSettings(TokenSettings, ScaleSettings):
    """DPPO's."""

    divergence_bound: PositiveFloat = 0.15
    """DPPO's bound: of |p - q| with `dppo_tv`, of nats with `dppo_kl`."""


@dataclass(frozen=True, kw_only=True)
class VESPOSettings(TokenSettings, ScaleSettings):
    """VESPO's."""

    shape_positive: NonNegativeFloat = 2.0
    """VESPO's exponent of a ratio where the advantage is not negative; larger fades small ratios faster."""
    rate_positive: PositiveFloat = 3.0
    """VESPO's rate where the advantage is not negative; larger fades large ratios faster."""
    shape_negative: NonNegativeFloat = 3.0
    """VESPO's exponent where the advantage is negative."""
    rate_negative: PositiveFloat = 2.0
    """VESPO's rate where the advantage is negative."""


@dataclass(frozen=True, kw_only=True)
class ProximalRLOOSettings(WhiteningSettings, ClipSettings):
    """Proximal RLOO's."""


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings(AlgorithmSettings):
    """Of losses that compare groups under policy and reference."""

    beta: PositiveFloat = 0.1
    """Strength with which a preference loss or CoPG keeps the policy near the reference."""


@dataclass(frozen=True, kw_only=True)
class OnlineDPOSettings(ReferenceSettings):
    """Online DPO's."""

    label_smoothing: BelowHalf = 0.0
    """Share of pairs that the preference loss assumes to be labelled the wrong way round."""
    preference: Literal["sigmoid", "ipo"] = "sigmoid"
    """The preference loss of online DPO."""


@dataclass(frozen=True, kw_only=True)
class DistillationSettings(ReductionSettings, SurrogateSettings):
    """On-policy distillation's."""


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings:
    """Learning from preference data, without sampling."""

    loss: Literal["dpo", "ipo", "hinge", "simpo", "orpo", "kto"]
    """The loss: of pairs, or with `kto` of completions that are good or bad."""
    beta: PositiveFloat | None = None
    """How strongly the policy is kept near the reference; with `orpo` the weight of the odds ratio. null means 2.0 with
    `simpo`, else 0.1."""
    label_smoothing: Annotated[BelowHalf, ReadIf("preference.loss", ("dpo",))] = 0.0
    """Assumed share of wrongly labelled pairs."""
    length_normalised: Annotated[bool | None, ReadIf("preference.loss", ("dpo", "ipo", "hinge"))] = None
    """Divide the log-probability of a completion by its tokens; null means with `ipo`. `simpo` and `orpo` always do."""
    gamma: Annotated[NonNegativeFloat, ReadIf("preference.loss", ("simpo",))] = 1.0
    """Margin that `simpo` asks for, in units of the reward."""
    desirable_weight: Annotated[NonNegativeFloat, ReadIf("preference.loss", ("kto",))] = 1.0
    """Weight of good completions."""
    undesirable_weight: Annotated[NonNegativeFloat, ReadIf("preference.loss", ("kto",))] = 1.0
    """Weight of bad completions."""
