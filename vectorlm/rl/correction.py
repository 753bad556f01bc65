"""Which tokens are learned from, and with what weight, when something else than the policy sampled them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from vectorlm.algorithms import importance_weights, rejection_mask
from vectorlm.algorithms.correction import Divergence, GateLevel, Level, Mode
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.config.rl import CorrectionSettings
from vectorlm.rollout.batch import RolloutBatch

Gate = Literal["ratio", "bernoulli_kl", "tv", "k2", "k3"]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "off": {},
    "tis": {"level": "token", "mode": "truncate", "high": 2.0},
    "icepop": {"level": "token", "mode": "mask", "low": 0.5, "high": 5.0},
    "seq_mask_tis": {
        "level": "token",
        "mode": "truncate",
        "high": 2.0,
        "gate": "ratio",
        "gate_level": "mean",
        "gate_low": 0.5,
        "gate_high": 2.0,
    },
    "mis": {"level": "geometric", "mode": "mask", "low": 0.5, "high": 2.0},
    "geometric": {"level": "geometric", "mode": "truncate", "low": 0.5, "high": 2.0},
    "decoupled": {"level": "token", "mode": "truncate", "high": 5.0},
    "bypass": {"bypass": True},
}
"""What each name of ``rl.correction.preset`` sets; a config's own knobs win."""

_LEVEL_OF_RATIO: dict[str, Level] = {"token": "token", "sum": "sequence", "mean": "geometric"}
"""What a gate's level is called where it is one of ratios."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The knobs, after the preset."""

    bypass: bool = False
    """Whether the engine's log-probabilities stand in for the trainer's old ones, without a forward pass for them."""
    level: Level | None = None
    """What the weights' bounds are compared with; None makes no weights."""
    mode: Mode = "truncate"
    """What happens to weights beyond the bounds."""
    low: float | None = None
    """Lower bound of the ratio."""
    high: float | None = None
    """Upper bound of the ratio."""
    normalise: bool = False
    """Whether weights are divided by their mean."""
    gate: Gate | None = None
    """What a token or completion may not exceed; None is no gate."""
    gate_level: GateLevel = "token"
    """Whose."""
    gate_low: float | None = None
    """Lower bound, for ``ratio``."""
    gate_high: float | None = None
    """Upper bound."""
    veto: float | None = None
    """Smallest ratio that a completion may hold."""

    @property
    def is_on(self) -> bool:
        """Whether anything is weighed or rejected before the update, for which the trainer's own pass is needed."""
        return not self.bypass and (self.level is not None or self.gate is not None or self.veto is not None)

    def judge(self, rows: RolloutBatch, old_logprobs: torch.Tensor) -> Judged:
        """Weigh the tokens of a batch and leave out those that are rejected.

        What is rejected is as if it had never been sampled: its tokens are in no loss and no denominator, and a
        completion that loses all of them is in no baseline either.

        Args:
            rows: The rollouts.
            old_logprobs: float32 [B, T], the trainer's at the weights of the rollout.
        """
        pair = (old_logprobs, rows.sampler_logprobs, rows.mask)
        weights, kept = None, rows.mask
        if self.level is not None:
            weights, kept = importance_weights(
                *pair,
                level=self.level,
                mode=self.mode,
                low=self.low,
                high=self.high,
                normalise=self.normalise,
            )
        kept = kept & self._gated(*pair)
        if weights is not None:
            weights = torch.where(kept, weights, 0.0)
        return Judged(rows, rows.without(~kept), weights)

    def weights_in_update(
        self, policy_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor | None:
        """Return float [B, T]: with bypass, the weights of the policy as it is now; None where there are none."""
        if not self.bypass or self.level is None:
            return None
        pair = (policy_logprobs.detach(), sampler_logprobs, mask)
        return importance_weights(*pair, level=self.level, mode=self.mode, low=self.low, high=self.high)[0]

    def _gated(self, old: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = rejection_mask(old, sampler, mask, veto=self.veto) if self.veto is not None else mask
        if self.gate is None:
            return kept
        if self.gate == "ratio":
            level = _LEVEL_OF_RATIO[self.gate_level]
            low, high = self.gate_low, self.gate_high
            return (
                kept & importance_weights(old, sampler, mask, level=level, mode="mask", low=low, high=high)[1]
            )
        divergence: Divergence = self.gate
        return kept & rejection_mask(
            old, sampler, mask, divergence=divergence, level=self.gate_level, bound=self.gate_high
        )


NO_CORRECTION = Correction()
"""Every token counts once."""


@dataclass(frozen=True)
class Judged:
    """A batch and what was left of it."""

    before: RolloutBatch
    rows: RolloutBatch
    """With what was rejected left out."""
    weights: torch.Tensor | None
    """float32 [B, T]; None where every token counts once."""

    def metrics(self) -> dict[str, float]:
        """Describe the weights after their bounds, and what was rejected."""
        tokens, kept = self.before.mask.sum(), self.rows.mask.sum()
        sequences, left = self.before.mask.any(dim=1).sum(), self.rows.mask.any(dim=1).sum()
        found = {
            "correction/rejected_tokens": 1 - (kept / tokens.clamp(min=1)).item() if tokens else 0.0,
            "correction/rejected_sequences": 1 - (left / sequences.clamp(min=1)).item() if sequences else 0.0,
        }
        if self.weights is not None and kept:
            weights = self.weights[self.rows.mask].double()
            found["correction/weight_mean"] = weights.mean().item()
            found["correction/weight_min"] = weights.min().item()
            found["correction/weight_max"] = weights.max().item()
            spread = (weights / weights.mean()).square().mean() if weights.any() else weights.new_ones(())
            found["correction/weight_ess"] = (1 / spread).item()
        return found


def correction_of(settings: CorrectionSettings, spec: AlgorithmSpec) -> Correction:
    """Return the preset's knobs, with the config's own in their place."""
    names = [field.name for field in fields(Correction)]
    own = {name: value for name in names if (value := getattr(settings, name)) is not None}
    correction = Correction(**{**PRESETS[settings.preset], **own})
    if correction.bypass and not spec.has_ratio and correction.level is None:
        # Such a loss has no weight for what the engine did otherwise, so it gets one.
        correction = replace(correction, **PRESETS["tis"])
    return correction


def correction_problems(
    settings: CorrectionSettings, spec: AlgorithmSpec
) -> Iterator[tuple[str, Any, str, str]]:
    """Yield setting, value, rule and fix of everything that makes no sense with this algorithm."""
    correction = correction_of(settings, spec)
    if correction == NO_CORRECTION:
        return
    if not spec.samples_from_policy:
        rule = f"has nothing to correct: {spec.name} may learn from completions of any policy"
        yield "preset", settings.preset, rule, "Use off."
        return
    if correction.bypass and spec.has_ratio and correction.level is not None:
        rule = f"counts the mismatch twice with bypass: {spec.name} has the ratio of policy and engine in its loss"
        yield "level", correction.level, rule, "Leave it out, or use the preset decoupled."
    if correction.bypass and (correction.gate or correction.veto is not None or correction.normalise):
        rule = "makes no forward pass of the old policy, which gates, vetoes and mean weights are made of"
        yield "bypass", True, rule, "Use another preset, or leave them out."
    row_weights = correction.level == "sequence" or (
        correction.level == "geometric" and correction.mode == "truncate"
    )
    if spec.level == "completion" and correction.level is not None and not row_weights:
        rule = f"gives every token a weight of its own, and {spec.name} has one loss for a whole completion"
        yield "level", correction.level, rule, "Use sequence, or geometric with mode: truncate."
    if not (correction.low or 0) <= 1 <= (1 if correction.high is None else correction.high):
        yield "low", correction.low, "and high must be bounds around 1: low <= 1 <= high", "Use 0.5 and 2.0."
    yield from _gate_problems(correction)


def _gate_problems(correction: Correction) -> Iterator[tuple[str, Any, str, str]]:
    if correction.gate is None:
        return
    if correction.gate == "ratio":
        if correction.gate_level == "max":
            rule = "is not a level of ratios: bounds of every token are those of gate_level: token, or a veto"
            yield "gate_level", "max", rule, "Use token, sum or mean."
        low, high = correction.gate_low, correction.gate_high
        if (low is None and high is None) or not (low or 0) <= 1 <= (1 if high is None else high):
            yield "gate_low", low, "and gate_high must be bounds around 1", "Use 0.5 and 2.0."
    elif correction.gate_high is None:
        yield "gate_high", None, f"is needed: the largest {correction.gate} that passes", "Use 0.1."
