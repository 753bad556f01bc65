"""Off-policy correction: tokens are weighted or rejected by the ratio of the trainer's to the engine's probability."""

from __future__ import annotations

from dataclasses import replace

import torch

from vectorlm.algorithms.batch import RolloutBatch
from vectorlm.algorithms.correction import RatioLevel, importance_weights, rejection_mask
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.rl.settings import PRESETS, Correction, CorrectionSettings

LEVEL_OF_RATIO_GATE: dict[str, RatioLevel] = {"token": "token", "sum": "sequence", "mean": "geometric"}
"""What `importance_weights` calls the level of a gate on ratios."""


def apply_correction(
    correction: Correction, batch: RolloutBatch, old_logprobs: torch.Tensor
) -> tuple[RolloutBatch, torch.Tensor | None]:
    """Return the batch without the rejected tokens, and the weights of its tokens; None counts every token once.

    A rejected token is treated as if it had never been sampled: it is in no loss and no denominator, and a completion
    that loses all its tokens leaves the baseline of its group.
    """
    sampler_logprobs, mask = batch.sampler_logprobs, batch.mask
    weights, kept = None, mask
    if correction.level is not None:
        weights, kept = importance_weights(
            old_logprobs,
            sampler_logprobs,
            mask,
            level=correction.level,
            mode=correction.mode,
            low=correction.low,
            high=correction.high,
            normalise=correction.normalise,
        )
    if correction.veto is not None:
        kept = kept & rejection_mask(old_logprobs, sampler_logprobs, mask, veto=correction.veto)
    if correction.gate == "ratio":
        _, accepted = importance_weights(
            old_logprobs,
            sampler_logprobs,
            mask,
            level=LEVEL_OF_RATIO_GATE[correction.gate_level],
            mode="mask",
            low=correction.gate_low,
            high=correction.gate_high,
        )
        kept = kept & accepted
    elif correction.gate is not None:
        kept = kept & rejection_mask(
            old_logprobs,
            sampler_logprobs,
            mask,
            divergence=correction.gate,
            level=correction.gate_level,
            bound=correction.gate_high,
        )
    if weights is not None:
        weights = torch.where(kept, weights, 0.0)
    return batch.without(~kept), weights


def weights_in_update(
    correction: Correction, policy_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor | None:
    """Return float [B, T]: with bypass, the weights from the policy of this moment; None where there are none."""
    if not correction.bypass or correction.level is None:
        return None
    weights, _ = importance_weights(
        policy_logprobs.detach(),
        sampler_logprobs,
        mask,
        level=correction.level,
        mode=correction.mode,
        low=correction.low,
        high=correction.high,
    )
    return weights


def correction_of(settings: CorrectionSettings, spec: AlgorithmSpec) -> Correction:
    """Return the preset's correction with the config's own values."""
    correction = Correction(**{**PRESETS[settings.preset], **settings.overrides})
    if correction.bypass and not spec.has_ratio and correction.level is None:
        # Without a ratio in the loss, nothing else would account for the engine's probabilities.
        correction = replace(correction, **PRESETS["tis"])
    return correction
