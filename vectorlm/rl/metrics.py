"""Metrics of a step: rollouts, mismatch of engine and trainer, batch, update and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vectorlm.algorithms.batch import LossInputs, RolloutBatch
from vectorlm.algorithms.correction import correction_metrics
from vectorlm.algorithms.groups import is_constant
from vectorlm.algorithms.kl import exp_clamped, kl_estimate, log_ratio, ratio
from vectorlm.algorithms.reduce import masked_mean, masked_sum
from vectorlm.algorithms.settings import AlgorithmSettings, ClipSettings, LevelSettings
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.ranks.topology import Topology
from vectorlm.rl.models import RLModels
from vectorlm.rl.rollout import Rollout, RolloutGroup, TrainBatch, kept_groups, logged_means
from vectorlm.train.recorder import memory_bytes, num_multiplied

LOWEST, HIGHEST, NUM_BINS = -2.0, 2.0, 80
"""Range and number of bins of the histogram of log-ratios; the outermost bins also count larger values."""
NUM_POSITIONS = 32
"""Maximum number of bins for the position of a token in its completion."""


def rollout_metrics(
    groups: Sequence[RolloutGroup], step: int, oldest_version: int | None = None
) -> dict[str, float]:
    """Return metrics of the sampled groups, also of dropped ones, and of their rewards; also by source, if named.

    `step` is the version that is trained; tokens of versions before `oldest_version` count as masked.
    """
    metrics = _describe(groups, step, oldest_version)
    for source in sorted({group.source for group in groups} - {""}):
        found = _describe([group for group in groups if group.source == source], step, oldest_version)
        metrics |= {f"source/{source}/{name}": value for name, value in found.items()}
    return metrics


def _describe(groups: Sequence[RolloutGroup], step: int, oldest_version: int | None) -> dict[str, float]:
    metrics = {
        "rollout/groups": float(len(kept_groups(groups))),
        "reward/unscored": float(sum(int(group.rewards.isnan().sum()) for group in groups)),
        "reward/errors": float(sum(len(group.errors) for group in groups)),
        "rollout/sampled_groups": float(len(groups)),
    }
    if not groups:
        return metrics
    rewards = torch.stack([group.rewards for group in groups])
    metrics |= _spread("reward", rewards, "mean", "std", "min", "max")
    for name in dict.fromkeys(name for group in groups for name in group.rewards_by_name):
        values = [group.rewards_by_name[name] for group in groups if name in group.rewards_by_name]
        metrics |= _spread(f"reward/{name}", torch.stack(values), "mean", "std")
    logged = logged_means(values for group in groups for values in group.logged)
    metrics |= {f"logged/{name}": value for name, value in logged.items()}
    if rewards.shape[1] > 1:
        is_same = is_constant(rewards, ~rewards.isnan())
        # Missing rewards are not replaced by the mean, which would make the spread smaller.
        count = (~rewards.isnan()).sum(dim=1)
        squares = (rewards - rewards.nanmean(dim=1, keepdim=True)).square().nansum(dim=1)
        # Because of rounding, equal rewards differ a little from their mean.
        within = torch.where(is_same[:, 0], 0.0, (squares / (count - 1).clamp(min=1)).sqrt())
        if (count > 1).any():
            metrics["reward/group_std"] = within[count > 1].mean().item()
        metrics["reward/constant_groups"] = is_same.float().mean().item()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([float(rollout.num_policy_tokens) for rollout in rollouts])
    is_cut = torch.tensor([any(row.is_truncated for row in rollout.rows) for rollout in rollouts])
    prompt_lengths = torch.tensor([float(len(rollout.numbers("prompt_token_ids"))) for rollout in rollouts])
    metrics |= _spread("prompt/length", prompt_lengths)
    metrics |= _spread("completion/length", lengths)
    metrics |= _spread("completion/terminated_length", lengths[~is_cut])
    metrics["completion/truncated"] = is_cut.float().mean().item()
    num_turns = sum(rollout.num_turns for rollout in rollouts)
    num_turns += sum(len(branch.turn_places) for rollout in rollouts for branch in rollout.branches)
    metrics["rollout/turns_mean"] = num_turns / len(rollouts)
    metrics["rollout/rows_mean"] = sum(len(rollout.rows) for rollout in rollouts) / len(rollouts)
    metrics["rollout/replayed"] = 1 - sum(not rollout.is_replayed for rollout in rollouts) / len(rollouts)
    # The age of dropped groups does not matter, because they are not trained on.
    trained = [
        rollout for group in kept_groups(groups) for rollout in group.rollouts if not rollout.is_replayed
    ]
    return metrics | _staleness(trained, step, oldest_version)


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return metrics of the rows that are trained on."""
    mask = batch.rows.mask
    is_trained = batch.rows.trained_rollouts.view_as(batch.rows.rewards)
    metrics = {"reward/trained_mean": batch.rows.rewards[is_trained].nanmean().item()}
    metrics |= _spread("advantage", batch.advantages[mask], "mean", "std", "min", "max", separator="/")
    if batch.returns is not None and batch.rows.values is not None:
        returns, values = batch.returns[mask], batch.rows.values[mask]
        metrics |= _spread("return", returns, separator="/")
        metrics |= _spread("value", values, separator="/")
        spread = returns.var(correction=0)
        unexplained = (returns - values).var(correction=0) / spread if spread > 0 else torch.tensor(1.0)
        metrics["value/explained_variance"] = 1.0 - unexplained.item()
    return metrics


def mismatch_metrics(
    batch: RolloutBatch, old_logprobs: torch.Tensor, band: tuple[float, float]
) -> dict[str, float]:
    """Return metrics of the difference between the log-probabilities of trainer and engine; `band` bounds the ratio."""
    logprobs = (old_logprobs, batch.sampler_logprobs, batch.mask)
    return logprob_gap(*logprobs) | correction_metrics(*logprobs, *band)


def logprob_gap(
    logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, mask: torch.Tensor
) -> dict[str, float]:
    """Return the mean and largest difference of log-probabilities [B, T] of trainer and engine in `mask`, in nats."""
    gap = (logprobs - sampler_logprobs)[mask].abs()
    return {"sampler/logprob_gap_mean": gap.mean().item(), "sampler/logprob_gap_max": gap.max().item()}


def first_difference(batch: RolloutBatch, rows: torch.Tensor, logprobs: torch.Tensor) -> str | None:
    """Describe the first trained token of `rows` whose log-probability [b, t] is not the engine's; None if all are."""
    columns = slice(logprobs.shape[1])
    sampler, mask, found = batch.sampler_logprobs[rows, columns], batch.mask[rows, columns], logprobs.cpu()
    places = torch.nonzero(mask & (found != sampler))
    if not len(places):
        return None
    index, column = places[0].tolist()
    row = int(rows[index])
    start = batch.first_trained[row] if batch.turn_starts is None else int(batch.turn_starts[row, column])
    prompt = batch.prompts[row // batch.rows_per_group] if batch.prompts else batch.input_ids[row, :start]
    return (
        f"exact: the trainer's log-probability of the token at position {column - start} of a completion is "
        f"{found[index, column]:.8e} and the engine's is {sampler[index, column]:.8e}. They must be equal "
        f"(docs/exact.md). The prompt is {prompt!r}."
    )


def accepted_tokens(engine: Any) -> dict[str, float]:
    """Return how many draft tokens an engine accepts per step of a sequence, if it uses speculative decoding."""
    found = engine.accepted_tokens() if getattr(engine, "speculates", False) else None
    return {} if found is None else {"sampler/accepted_tokens": found}


def correction_effect(
    before: RolloutBatch, after: RolloutBatch, weights: torch.Tensor | None
) -> dict[str, float]:
    """Return metrics of the rejected tokens, and of the weights inside their bounds."""
    tokens, kept = before.mask.sum(), after.mask.sum()
    sequences, left = before.mask.any(dim=1).sum(), after.mask.any(dim=1).sum()
    found = {
        "correction/rejected_tokens": 1 - (kept / tokens.clamp(min=1)).item() if tokens else 0.0,
        "correction/rejected_sequences": 1 - (left / sequences.clamp(min=1)).item() if sequences else 0.0,
    }
    if weights is not None and kept:
        weights = weights[after.mask].double()
        found["correction/weight_mean"] = weights.mean().item()
        found["correction/weight_min"] = weights.min().item()
        found["correction/weight_max"] = weights.max().item()
        spread = (weights / weights.mean()).square().mean() if weights.any() else weights.new_ones(())
        found["correction/weight_ess"] = (1 / spread).item()
    return found


def count_log_ratios(
    batch: RolloutBatch, old_logprobs: torch.Tensor, band: tuple[float, float]
) -> dict[str, Any]:
    """Count the log-ratios of trainer and engine by size and by position, for ``correction.png``.

    Returns:
        ``histogram``, the tokens per bin from ``lowest`` to ``highest``; ``tokens`` and ``out_of_band``, the tokens per
        bin of positions in a completion; and ``tokens_per_place``, the width of these bins.
    """
    log_ratios = old_logprobs - batch.sampler_logprobs
    known = batch.mask & ~log_ratios.isnan()
    values = log_ratios[known].clamp(LOWEST, HIGHEST)
    histogram = torch.histc(values.float(), bins=NUM_BINS, min=LOWEST, max=HIGHEST)
    first = torch.tensor(batch.first_trained)[:, None]
    positions = (torch.arange(known.shape[1]) - first)[known]
    width = max(-(-(int(positions.max()) + 1) // NUM_POSITIONS), 1) if len(positions) else 1
    ratios = log_ratios[known].exp()
    outside = (ratios < band[0]) | (ratios > band[1])
    count = int(positions.max()) // width + 1 if len(positions) else 1
    return {
        "lowest": LOWEST,
        "highest": HIGHEST,
        "histogram": histogram.int().tolist(),
        "tokens_per_place": width,
        "tokens": torch.bincount(positions // width, minlength=count).tolist(),
        "out_of_band": torch.bincount(positions[outside] // width, minlength=count).tolist(),
    }


class SpeedMeter:
    """Computes speeds from the times of a step."""

    def __init__(
        self, models: RLModels, peak_flops: float | None = None, *, overlaps_sampling: bool = False
    ) -> None:
        """Count the weights that multiply every token; `peak_flops` is the peak of all devices together."""
        self._num_weights = num_multiplied(models.policy.model)
        if models.critic is not None:
            self._num_weights += num_multiplied(models.critic.model)
        self._peak_flops, self._overlaps_sampling = peak_flops, overlaps_sampling
        self._device = models.policy_step.topology.device
        self._swapped_at: float | None = None
        self.tokens_seen = 0
        """Tokens of prompts and completions that the whole run has sampled."""

    def engine_idle(self, busy: Sequence[tuple[float, float]], swapped_at: float | None) -> dict[str, float]:
        """Return the share of time between the last two swaps in which the engine was idle."""
        before, self._swapped_at = self._swapped_at, swapped_at
        if not busy or before is None or swapped_at is None or swapped_at == before:
            return {}
        busy_s = sum(end - max(start, before) for start, end in busy if end > before)
        return {"perf/engine_idle": 1 - busy_s / (swapped_at - before)}

    def speeds(
        self, times: Mapping[str, float], metrics: Mapping[str, float], groups: Sequence[RolloutGroup]
    ) -> dict[str, float]:
        """Return the speeds of a step, whose rollouts are in `groups`."""
        found: dict[str, float] = {}
        if groups:
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            generated = sum(rollout.num_policy_tokens for rollout in rollouts)
            read = sum(len(row.numbers("prompt_token_ids")) for rollout in rollouts for row in rollout.rows)
            self.tokens_seen += generated + read
            found["perf/tokens_seen"] = float(self.tokens_seen)
            found["perf/tokens_per_s"] = (generated + read) / times["time/step_s"]
            # If training overlaps with sampling, `time/generate_s` is only the time that the ranks waited.
            sampling_s = times["time/step_s" if self._overlaps_sampling else "time/generate_s"]
            found["perf/generated_tokens_per_s"] = generated / sampling_s
        found["perf/trainer_idle"] = times["time/generate_s"] / times["time/step_s"]
        found["perf/stall"] = metrics["time/stall_s"] / times["time/step_s"]
        if "perf/trained_tokens" in metrics:
            work = 6 * self._num_weights * metrics["perf/trained_tokens"]
            found["perf/model_flops_per_s"] = work / times["time/update_s"]
            if self._peak_flops is not None:
                found["perf/mfu"] = found["perf/model_flops_per_s"] / self._peak_flops
        return found | {"perf/memory_max_bytes": float(memory_bytes(self._device))}


class MetricAccumulator:
    """Adds up metrics of micro-batches; one exchange between ranks per optimizer step.

    >>> accumulator.begin_step(num_tokens)  # doctest: +SKIP
    >>> accumulator.add("policy/loss", loss)  # once per micro-batch, on every rank
    >>> accumulator.end_step()
    """

    def __init__(self, topology: Topology) -> None:
        """Start without metrics."""
        self._topology = topology
        self._num_tokens = 1
        self._sums: dict[str, torch.Tensor] = {}
        self._largest: dict[str, torch.Tensor] = {}
        self._history: dict[str, list[float]] = {}
        self.difference: str | None = None
        """In exact mode, a description of this rank's first token that differs from the engine's; None if none does."""

    def begin_step(self, num_tokens: int) -> None:
        """Begin an optimizer step; `num_tokens` of all ranks is the denominator of means over tokens."""
        self._num_tokens = num_tokens
        self._sums = {}
        self._largest = {}

    def add(self, name: str, share: torch.Tensor) -> None:
        """Add the term of one micro-batch to a sum."""
        # Ranks that share rows add equal terms.
        share = share.detach().double() / self._topology.ranks_per_share
        self._sums[name] = self._sums[name] + share if name in self._sums else share

    def add_tokens(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the masked values [B, T] of a micro-batch to a mean over all tokens of the step."""
        self.add(name, torch.where(mask, values, 0.0).sum() / self._num_tokens)

    def add_largest(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Record the largest value of a token, or 0 if all values are negative."""
        largest = torch.where(mask, values, 0.0).max().detach().double()
        self._largest[name] = torch.maximum(self._largest.get(name, largest), largest)

    def note(self, name: str, value: float) -> None:
        """Record a value that is the same on all ranks."""
        self._history.setdefault(name, []).append(value)

    def note_all(self, prefix: str, values: Mapping[str, float]) -> None:
        """Record values that are the same on all ranks, as ``prefix/name``."""
        for name, value in values.items():
            self.note(f"{prefix}/{name}", value)

    def end_step(self) -> dict[str, float]:
        """Return the values of the step, summed over the ranks; every rank must have added the same names."""
        values: dict[str, float] = {}
        for found, operation in ((self._sums, dist.ReduceOp.SUM), (self._largest, dist.ReduceOp.MAX)):
            if not found:
                continue
            together = torch.stack(list(found.values()))
            if self._topology.world_size > 1:
                dist.all_reduce(together, operation)
            values |= dict(zip(found, together.tolist(), strict=True))
        for name, value in values.items():
            self.note(name, value)
        return values

    def averages(self) -> dict[str, float]:
        """Return the mean of each metric over the optimizer steps, or the largest of largest values."""
        return {
            name: max(values) if name.endswith("_max") else sum(values) / len(values)
            for name, values in self._history.items()
        }


@torch.no_grad()
def add_policy_metrics(
    accumulator: MetricAccumulator,
    spec: AlgorithmSpec,
    hparams: AlgorithmSettings,
    inputs: LossInputs,
    rollouts: LossInputs,
    shares: torch.Tensor | None,
    entropy: torch.Tensor,
    num_units: int,
) -> None:
    """Add the metrics of a micro-batch: of its tokens, and the algorithm's own metrics of completions or groups.

    `rollouts` are the `inputs` with the tokens of a rollout's other rows. `shares` is the share of a rollout's tokens
    that each row has; None if rows are rollouts. `num_units` counts the completions or groups of the step.
    """
    mask = inputs.mask
    ratios = ratio(inputs.policy_logprobs, inputs.old_logprobs)
    accumulator.add_tokens("policy/entropy", entropy, mask)
    # The old policy sampled these tokens: they estimate its divergence from the new policy.
    divergence = kl_estimate(inputs.old_logprobs, inputs.policy_logprobs, "k3")
    accumulator.add_tokens("policy/kl", divergence, mask)
    accumulator.add_tokens("policy/ratio_mean", ratios, mask)
    accumulator.add_largest("policy/ratio_max", ratios, mask)
    if spec.clips is not None:
        assert isinstance(hparams, ClipSettings)
        logs = log_ratio(inputs.policy_logprobs, inputs.old_logprobs)
        whole_logs = log_ratio(rollouts.policy_logprobs, rollouts.old_logprobs)
        if spec.clips == "sum":
            logs = masked_sum(whole_logs, rollouts.mask)[:, None]
        elif isinstance(hparams, LevelSettings) and hparams.importance_sampling_level == "sequence":
            logs = masked_mean(whole_logs, rollouts.mask)[:, None]
        # Count the tokens whose gradient is 0 because of a clipped ratio.
        clipped = exp_clamped(logs).expand_as(mask)
        low = (clipped < 1 - hparams.clip_low) & (inputs.advantages < 0)
        high = (clipped > 1 + hparams.clip_high) & (inputs.advantages > 0)
        accumulator.add_tokens("policy/clip_low", low.float(), mask)
        accumulator.add_tokens("policy/clip_high", high.float(), mask)
        accumulator.add_tokens("policy/clip_fraction", (low | high).float(), mask)
    if inputs.reference_logprobs is not None:
        divergence = kl_estimate(inputs.policy_logprobs, inputs.reference_logprobs, "k1")
        accumulator.add_tokens("reference/kl", divergence, mask)
    size = inputs.rows_per_group if spec.level == "group" else 1
    units = mask.any(dim=1).view(-1, size).any(dim=1)
    for name, values in spec.observe(rollouts, hparams).items():
        values = values if shares is None else shares * values
        accumulator.add(name, torch.where(units, values, 0.0).sum() / num_units)


def _staleness(rollouts: Sequence[Rollout], step: int, oldest_version: int | None) -> dict[str, float]:
    """Return metrics of the age of the trained tokens."""
    by_rollout = [versions for rollout in rollouts if len(versions := rollout.sampled_versions)]
    if not by_rollout:
        return {}
    lags = step - np.concatenate(by_rollout)
    spans = [int(np.ptp(versions)) for versions in by_rollout]
    masked = {}
    if oldest_version is not None:
        masked["staleness/masked_tokens"] = int((lags > step - oldest_version).sum()) / len(lags)
    return masked | {
        "staleness/token_max": float(lags.max()),
        "staleness/token_mean": int(lags.sum()) / len(lags),
        "staleness/sequence_max": float(max(spans)),
        "staleness/mixed_sequences": sum(span > 0 for span in spans) / len(spans),
    }


def _spread(name: str, values: torch.Tensor, *which: str, separator: str | None = None) -> dict[str, float]:
    """Return mean, min and max, or `which`, of the values that are not NaN; nothing if there are none."""
    numbers = values[~values.isnan()].double()
    if not len(numbers):
        return {}
    found = {
        "mean": numbers.mean(),
        "std": numbers.std(correction=0),
        "min": numbers.min(),
        "max": numbers.max(),
    }
    between = separator or ("/" if "std" in which else "_")
    return {f"{name}{between}{kind}": found[kind].item() for kind in which or ("mean", "min", "max")}
