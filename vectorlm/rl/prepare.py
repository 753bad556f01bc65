"""Prepare a batch for the losses: log-probabilities, correction, KL penalty, advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vectorlm.algorithms.batch import RolloutBatch
from vectorlm.algorithms.correction import RatioLevel, importance_weights, rejection_mask
from vectorlm.algorithms.groups import whiten
from vectorlm.algorithms.kl import kl_estimate
from vectorlm.algorithms.logprobs import EntropyKind
from vectorlm.algorithms.settings import WhiteningSettings
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.rl.metrics import correction_effect, count_log_ratios, mismatch_metrics
from vectorlm.rl.micro_batch import MicroBatch, RowFunction, map_rows
from vectorlm.rl.models import AllRows, RLModels, ServerTeacher
from vectorlm.rl.rollout import TrainBatch
from vectorlm.rl.settings import PRESETS, Correction, CorrectionSettings, StepSettings, TeacherSettings
from vectorlm.train.packing import num_needed


def prepare_batch(
    batch: RolloutBatch,
    models: RLModels,
    spec: AlgorithmSpec,
    settings: StepSettings,
    topology: Topology,
    *,
    kl_coef: float = 0.0,
) -> TrainBatch:
    """Return the batch to train on; called on all ranks.

    `kl_coef` is the weight of the KL penalty; it is used here if the penalty is part of the reward.
    """
    max_tokens, packs = settings.update.max_tokens_per_micro_batch, models.why_padded is None
    all_rows = partial(map_rows, topology=topology, max_tokens=max_tokens, packs=packs)
    batch = _with_engine_routes(batch, settings)
    correction = settings.correction
    in_reward = models.reference is not None and settings.kl.kl_in == "reward"
    # In the only optimizer step of a batch, the policy still has the weights that sampled: the update's pass is enough.
    is_one_step = settings.update.steps_per_batch == 1
    learns_tokens = settings.teacher is not None and settings.teacher.kind == "sampled"
    needs_old = in_reward or learns_tokens or correction.is_on or not is_one_step or spec.needs_old
    # Completions that only enter baselines also pay the penalty, and advantages may read all their tokens.
    read = batch.with_compared() if in_reward or spec.needs_old or spec.needs_gradient_norms else batch
    records = settings.update.router_replay == "old_policy" and not is_one_step
    recorded = RecordedRoutes(models, read) if records else None
    of_policy = all_rows if recorded is None else partial(all_rows, note=recorded.note)
    old, gradient_norms, entropies, weights = _first_pass(read, models, spec, settings, needs_old, of_policy)
    if recorded is not None:
        batch = replace(batch, replayed=recorded.together(topology, partial(of_policy, read)))
    metrics, log_ratios = dict[str, float](), None
    if old is not None and not correction.bypass:
        corrected, weights = apply_correction(correction, batch, old)
        if settings.logs_mismatch:
            metrics, log_ratios = _mismatch(batch, old, settings)
            metrics |= correction_effect(batch, corrected, weights)
        batch = corrected
    read = batch.with_compared() if in_reward else batch
    reference = None if models.reference is None else all_rows(read, models.reference)
    values = None if models.critic is None else all_rows(batch.for_baselines(), models.critic)
    teacher, teacher_top = _taught(batch, models, settings.teacher, all_rows)
    models.reshard()
    if in_reward and kl_coef > 0:
        assert old is not None
        assert reference is not None
        divergence = kl_estimate(old, reference, settings.kl.kl_kind)
        batch = batch.penalised(torch.where(read.mask, kl_coef * divergence, 0.0))
    if weights is not None:
        # The correction does not weigh completions that only enter baselines.
        weights = torch.where(batch.mask, weights, 1.0)
    batch = replace(batch, values=values, old_logprobs=old, gradient_norms=gradient_norms, weights=weights)
    compared = batch.for_baselines()
    advantages = batch.with_branches(spec.advantages(compared, settings.hparams))
    returns = None if values is None else torch.where(batch.mask, advantages + values, 0.0)
    if isinstance(settings.hparams, WhiteningSettings) and settings.hparams.whiten_advantages:
        advantages = whiten(advantages, batch.with_compared().mask)
    advantages = torch.where(batch.mask, advantages, 0.0)
    if teacher is not None:
        assert old is not None
        assert settings.teacher is not None
        # Each token pays only for itself: the loss then has the gradient of KL(policy || teacher) at every position.
        divergence = kl_estimate(old, teacher, "k1")
        advantages = advantages - settings.teacher.coef * torch.where(batch.mask, divergence, 0.0)
    marked = None if spec.mark is None else spec.mark(batch, advantages, settings.hparams)
    share = settings.update.top_entropy_quantile
    learns = None if entropies is None else _highest(entropies, batch.mask, share)
    return TrainBatch(
        batch,
        advantages,
        old,
        reference,
        returns,
        marked=marked,
        learns=learns,
        metrics=metrics,
        mismatch=log_ratios,
        teacher_logprobs=teacher,
        teacher_top=teacher_top,
    )


def _taught(
    batch: RolloutBatch, models: RLModels, teacher: TeacherSettings | None, all_rows: AllRows
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
    """Return a teacher's log-probabilities of sampled tokens, or its most probable tokens; see `TrainBatch`."""
    if teacher is None or models.teacher is None:
        return None, None
    if isinstance(models.teacher, ServerTeacher) and teacher.top_k is not None:
        return None, models.teacher.top_logprobs(batch, teacher.top_k)
    return models.teacher.logprobs(batch, all_rows) if teacher.kind == "sampled" else None, None


def _first_pass(
    batch: RolloutBatch,
    models: RLModels,
    spec: AlgorithmSpec,
    settings: StepSettings,
    needs_old: bool,
    all_rows: AllRows,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return old log-probabilities, norms of their gradients, entropies and bypass weights; None for unused ones."""

    def logprobs_and_entropy(batch: RolloutBatch, kind: EntropyKind) -> tuple[torch.Tensor, torch.Tensor]:
        found = all_rows(batch, lambda rows: torch.stack(models.policy(rows, kind)[:2]))
        return found[0], found[1]

    old = gradient_norms = entropies = weights = None
    if spec.needs_gradient_norms:
        old, collision = logprobs_and_entropy(batch, "collision")
        gradient_norms = _gradient_norms(old, collision)
        weights = weights_in_update(settings.correction, old, batch.sampler_logprobs, batch.mask)
    if settings.update.top_entropy_quantile < 1:
        logprobs, entropies = logprobs_and_entropy(batch, "value")
        old = logprobs if old is None else old
    if settings.correction.bypass or settings.exact:
        old = batch.sampler_logprobs
    elif old is None and needs_old:
        old = all_rows(batch, models.policy.logprobs)
    return old, gradient_norms, entropies, weights


def _gradient_norms(logprobs: torch.Tensor, collision: torch.Tensor) -> torch.Tensor:
    """Return 1 - 2 p + `collision`, the sum of all squared probabilities, for tokens of probability p; float [B, T]."""
    # 1 - 2 p cancels for p near 1. The squares of the other tokens add up to at most (1 - p)^2.
    of_token = torch.expm1(logprobs).square()
    of_others = torch.minimum((collision - (2 * logprobs).exp()).clamp(min=0), of_token)
    return of_token + of_others


def _mismatch(
    batch: RolloutBatch, old: torch.Tensor, settings: StepSettings
) -> tuple[dict[str, float], Mapping[str, Any]]:
    """Return the metrics of the mismatch of trainer and engine, and the counts of their log-ratios."""
    band = (settings.mismatch.band_low, settings.mismatch.band_high)
    return mismatch_metrics(batch, old, band), count_log_ratios(batch, old, band)


def _with_engine_routes(batch: RolloutBatch, settings: StepSettings) -> RolloutBatch:
    """Let the policy use the engine's experts, if the run replays them; raise if a trained row has no experts."""
    if settings.update.router_replay != "engine":
        return batch
    routes = batch.routes or [None] * len(batch.mask)
    if any(found is None for found, row in zip(routes, batch.mask, strict=True) if row.any()):
        raise ConfigError(
            "rl.router_replay=engine needs the experts of every token, and the engine returned none for some "
            "completions (docs/moe.md). Use old_policy or off."
        )
    return replace(batch, replayed=routes)


class RecordedRoutes:
    """The experts that the policy chooses in all rows of a batch, recorded in the passes of all ranks."""

    def __init__(self, models: RLModels, batch: RolloutBatch) -> None:
        """Prepare to record the choices of the policy's routers in the rows of `batch`."""
        assert models.policy.routers is not None
        self._routers, self._logprobs = models.policy.routers, models.policy.logprobs
        self._routers.own = None
        self._lengths = num_needed(batch.mask) if models.why_padded is None else list(batch.num_tokens)
        self._rows: dict[int, np.ndarray] = {}

    def note(self, micro_batch: MicroBatch) -> None:
        """Record the choices of the last pass, which computed `micro_batch`."""
        rows = micro_batch.rows.tolist()
        self._rows |= {rows[index]: found for index, found in self._routers.own_by_row().items()}

    def together(self, topology: Topology, run: Callable[[RowFunction], Any]) -> list[np.ndarray | None]:
        """Return the choices of all ranks by row; called on all ranks.

        `run` applies the policy to all rows, if no pass has yet: with a bypass there are no old log-probabilities.
        """
        if self._routers.own is None:
            run(self._logprobs)
        assert self._routers.own is not None
        shape = (sum(self._lengths), *self._routers.own.shape[1:])
        ends = np.cumsum(self._lengths)
        whole = np.zeros(shape, self._routers.dtype)
        for row, found in self._rows.items():
            found = found[: self._lengths[row]]
            whole[ends[row] - self._lengths[row] :][: len(found)] = found
        if topology.world_size > 1:
            # Ranks that compute the same tokens have the same bytes; other ranks have zeros.
            both = torch.from_numpy(whole.view(np.uint8)).to(topology.device)
            dist.all_reduce(both, dist.ReduceOp.MAX)
            whole = both.cpu().numpy().view(whole.dtype)
        return [found if len(found) else None for found in np.split(whole, ends[:-1])]


def _highest(entropies: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    """Return the masked tokens whose entropy is at least the (1 - share) quantile of the batch, bool [B, T]."""
    inside = entropies[mask].double()
    # torch.quantile refuses more than 16 million numbers.
    rank = min(math.ceil((1 - share) * (len(inside) - 1) - 1e-9) + 1, len(inside))
    return mask & (entropies >= inside.kthvalue(rank).values) if len(inside) else mask


LEVEL_OF_RATIO_GATE: dict[str, RatioLevel] = {"token": "token", "sum": "sequence", "mean": "geometric"}
"""Level of `importance_weights` for each level of a gate on ratios."""


def apply_correction(
    correction: Correction, batch: RolloutBatch, old_logprobs: torch.Tensor
) -> tuple[RolloutBatch, torch.Tensor | None]:
    """Return the batch without the rejected tokens, and the weights of its tokens, None if all are 1.

    A rejected token is treated as never sampled: it is in no loss and no denominator. A completion whose tokens are
    all rejected is removed from the baseline of its group.
    """
    logprobs, mask = (old_logprobs, batch.sampler_logprobs), batch.mask
    weights, kept = _weigh(correction, *logprobs, mask)
    if correction.veto is not None:
        kept = kept & rejection_mask(*logprobs, mask, veto=correction.veto)
    if correction.gate == "ratio":
        level = LEVEL_OF_RATIO_GATE[correction.gate_level]
        gate = Correction(level=level, mode="mask", low=correction.gate_low, high=correction.gate_high)
        kept = kept & _weigh(gate, *logprobs, mask)[1]
    elif correction.gate is not None:
        how, bound = correction.gate_level, correction.gate_high
        kept = kept & rejection_mask(*logprobs, mask, divergence=correction.gate, level=how, bound=bound)
    if weights is not None:
        weights = torch.where(kept, weights, 0.0)
    return batch.without(~kept), weights


def weights_in_update(
    correction: Correction, policy_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor | None:
    """Return the weights for the current policy, float [B, T]; None without `bypass` or without weights."""
    if not correction.bypass:
        return None
    return _weigh(correction, policy_logprobs.detach(), sampler_logprobs, mask)[0]


def _weigh(
    correction: Correction, policy_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the weights of the tokens, None without a level; and the tokens inside the bounds, bool [B, T]."""
    if correction.level is None:
        return None, mask
    return importance_weights(
        policy_logprobs,
        sampler_logprobs,
        mask,
        level=correction.level,
        mode=correction.mode,
        low=correction.low,
        high=correction.high,
        normalise=correction.normalise,
    )


def correction_of(settings: CorrectionSettings, spec: AlgorithmSpec) -> Correction:
    """Return the correction of the preset, with the values that the config sets."""
    fields = {**PRESETS[settings.preset or "off"], **settings.overrides}
    if fields.get("bypass") and not spec.has_ratio and "level" not in fields:
        # Without a ratio in the loss, nothing else would account for the engine's probabilities.
        fields = {**PRESETS["tis"], **fields}
    return Correction(**fields)
