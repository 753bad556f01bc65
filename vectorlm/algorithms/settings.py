"""Settings classes of algorithms and of preference losses.

A small class has the settings that one function reads. An algorithm's class inherits the classes of its functions.
This module does not import torch, because reading a config must not.
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
    """Settings for all algorithms."""

    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal with newly sampled groups."""


@dataclass(frozen=True, kw_only=True)
class ReductionSettings(AlgorithmSettings):
    """Settings for losses with one value per token."""

    reduction: Reduction = "token_mean"
    """Reduction of the losses of tokens to one number."""


@dataclass(frozen=True, kw_only=True)
class WhiteningSettings(AlgorithmSettings):
    """Settings for algorithms whose updates depend on the size of advantages."""

    whiten_advantages: bool = False
    """Normalise advantages to mean 0 and standard deviation 1 over the batch."""


@dataclass(frozen=True, kw_only=True)
class TokenSettings(ReductionSettings, WhiteningSettings):
    """Settings for algorithms with one advantage and one loss per token."""


@dataclass(frozen=True, kw_only=True)
class ScaleSettings(AlgorithmSettings):
    """Settings for advantages relative to the group."""

    scale_rewards: RewardScale = "group"
    """Divisor of the advantages of a group: the standard deviation of the group's or the batch's rewards, or none."""


@dataclass(frozen=True, kw_only=True)
class LevelSettings(AlgorithmSettings):
    """Settings for losses with a probability ratio per token or per completion."""

    importance_sampling_level: ImportanceLevel = "token"
    """Whether the loss uses the ratio of every token, or one per completion: the exponential of its mean log-ratio."""


@dataclass(frozen=True, kw_only=True)
class ClipSettings(AlgorithmSettings):
    """Settings for losses that clip the ratio."""

    clip_low: NonNegativeFloat = 0.2
    """The ratio of policies is clipped to at least 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio of policies is clipped to at most 1 + clip_high."""


@dataclass(frozen=True, kw_only=True)
class SurrogateSettings(ClipSettings, LevelSettings):
    """Settings for PPO's clipped loss."""

    dual_clip: AboveOne | None = None
    """Upper bound of the loss, times the size of a negative advantage; null means no bound."""


@dataclass(frozen=True, kw_only=True)
class PPOSettings(TokenSettings, SurrogateSettings):
    """Settings for PPO."""

    gamma: UnitInterval = 1.0
    """Discount per token."""
    lam: UnitInterval = 1.0
    """Lambda of generalised advantage estimation (GAE)."""


@dataclass(frozen=True, kw_only=True)
class ClippedSettings(TokenSettings, SurrogateSettings):
    """Settings for algorithms that use PPO's clipped loss with their own advantages."""


@dataclass(frozen=True, kw_only=True)
class GRPOSettings(ClippedSettings, ScaleSettings):
    """Settings for GRPO and its variants."""


@dataclass(frozen=True, kw_only=True)
class CISPOSettings(TokenSettings, ScaleSettings, ClipSettings, LevelSettings):
    """Settings for CISPO."""


@dataclass(frozen=True, kw_only=True)
class SAPOSettings(TokenSettings, ScaleSettings, LevelSettings):
    """Settings for SAPO."""

    temperature_positive: PositiveFloat = 1.0
    """SAPO's temperature for positive advantages."""
    temperature_negative: PositiveFloat = 1.05
    """SAPO's temperature for negative advantages."""


@dataclass(frozen=True, kw_only=True)
class PassAtKSettings(ClippedSettings):
    """Settings for Pass@k training."""

    pass_k: PositiveInt = 4
    """k of pass@k: the best of k completions counts. Must be below `group_size`."""


@dataclass(frozen=True, kw_only=True)
class GMPOSettings(WhiteningSettings, ScaleSettings, ClipSettings):
    """Settings for GMPO."""


@dataclass(frozen=True, kw_only=True)
class CovarianceSettings(AlgorithmSettings):
    """Settings for algorithms that treat tokens of high covariance differently."""

    covariance_share: UnitInterval = 0.0002
    """Share of tokens that `clip_cov` excludes from the loss and `kl_cov` penalises."""


@dataclass(frozen=True, kw_only=True)
class ClipCovSettings(GRPOSettings, CovarianceSettings):
    """Settings for Clip-Cov."""

    covariance_low: NonNegativeFloat = 1.0
    """Covariance of advantage and log-probability above which `clip_cov` draws tokens."""
    covariance_high: PositiveFloat = 5.0
    """Covariance of advantage and log-probability below which `clip_cov` draws tokens."""


@dataclass(frozen=True, kw_only=True)
class KLCovSettings(TokenSettings, ScaleSettings, CovarianceSettings):
    """Settings for KL-Cov."""

    covariance_kl_coef: NonNegativeFloat = 1.0
    """Weight of the KL penalty of `kl_cov`."""


@dataclass(frozen=True, kw_only=True)
class DPPOSettings(TokenSettings, ScaleSettings):
    """Settings for DPPO."""

    divergence_bound: PositiveFloat = 0.15
    """DPPO's bound on the divergence of a token: |p - q| with `dppo_tv`, nats with `dppo_kl`."""


@dataclass(frozen=True, kw_only=True)
class VESPOSettings(TokenSettings, ScaleSettings):
    """Settings for VESPO."""

    shape_positive: NonNegativeFloat = 2.0
    """VESPO's exponent of the ratio for advantages >= 0; larger values reduce the weight of small ratios."""
    rate_positive: PositiveFloat = 3.0
    """VESPO's rate for advantages >= 0; larger values reduce the weight of large ratios."""
    shape_negative: NonNegativeFloat = 3.0
    """VESPO's exponent of the ratio for negative advantages."""
    rate_negative: PositiveFloat = 2.0
    """VESPO's rate for negative advantages."""


@dataclass(frozen=True, kw_only=True)
class ProximalRLOOSettings(WhiteningSettings, ClipSettings):
    """Settings for Proximal RLOO."""


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings(AlgorithmSettings):
    """Settings for losses that compare completions under policy and reference."""

    beta: PositiveFloat = 0.1
    """Strength with which a preference loss or CoPG keeps the policy near the reference."""


@dataclass(frozen=True, kw_only=True)
class OnlineDPOSettings(ReferenceSettings):
    """Settings for online DPO."""

    label_smoothing: BelowHalf = 0.0
    """Share of pairs that the preference loss assumes to be mislabelled."""
    preference: Literal["sigmoid", "ipo"] = "sigmoid"
    """The preference loss of online DPO."""


@dataclass(frozen=True, kw_only=True)
class DistillationSettings(ReductionSettings, SurrogateSettings):
    """Settings for on-policy distillation."""


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings:
    """Settings for learning from preference data, without sampling."""

    loss: Literal["dpo", "ipo", "hinge", "simpo", "orpo", "kto"]
    """The loss. `kto` learns from good and bad completions, the others from pairs."""
    beta: PositiveFloat | None = None
    """Strength of the loss's pull towards the reference; with `orpo`, the weight of the odds ratio. null means
    2.0 with `simpo`, else 0.1."""
    label_smoothing: Annotated[BelowHalf, ReadIf("preference.loss", ("dpo",))] = 0.0
    """Assumed share of mislabelled pairs."""
    length_normalised: Annotated[bool | None, ReadIf("preference.loss", ("dpo", "ipo", "hinge"))] = None
    """Divide the log-probability of a completion by its length; null means only with `ipo`. `simpo` and `orpo` always
    divide."""
    gamma: Annotated[NonNegativeFloat, ReadIf("preference.loss", ("simpo",))] = 1.0
    """Target margin of `simpo`, in units of the reward."""
    desirable_weight: Annotated[NonNegativeFloat, ReadIf("preference.loss", ("kto",))] = 1.0
    """Weight of good completions."""
    undesirable_weight: Annotated[NonNegativeFloat, ReadIf("preference.loss", ("kto",))] = 1.0
    """Weight of bad completions."""
