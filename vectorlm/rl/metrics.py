"""What a step looks like in numbers: its rollouts, the mismatch of engine and trainer, the batch, the speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vectorlm.algorithms.batch import RolloutBatch
from vectorlm.algorithms.correction import correction_metrics
from vectorlm.algorithms.groups import is_constant
from vectorlm.ranks.topology import Topology
from vectorlm.rl.batch import TrainBatch
from vectorlm.rl.models import RLModels
from vectorlm.rl.rollout import Rollout, RolloutGroup, kept_groups, logged_means
from vectorlm.train.recorder import memory_bytes, num_multiplied

LOWEST, HIGHEST, NUM_BINS = -2.0, 2.0, 80
"""The histogram of log-ratios; values beyond count in the outermost bins."""
NUM_POSITIONS = 32
"""Bins of the position of a token in its completion."""


def rollout_metrics(
    groups: Sequence[RolloutGroup], step: int, oldest_version: int | None = None
) -> dict[str, float]:
    """Describe what was sampled, dropped groups included, and its rewards; also by source, where there are several.

    `step` is the version being trained; tokens of versions before `oldest_version` are left out.
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
        values = torch.stack([each.rewards_by_name[name] for each in groups if name in each.rewards_by_name])
        metrics |= _spread(f"reward/{name}", values, "mean", "std")
    logged = logged_means(each for group in groups for each in group.logged)
    metrics |= {f"logged/{name}": value for name, value in logged.items()}
    if rewards.shape[1] > 1:
        is_same = is_constant(rewards, ~rewards.isnan())
        # One of completions that were not scored must not be filled in: the mean would make the spread smaller.
        count = (~rewards.isnan()).sum(dim=1)
        squares = (rewards - rewards.nanmean(dim=1, keepdim=True)).square().nansum(dim=1)
        # Rounding leaves equal rewards a little apart from their mean.
        within = torch.where(is_same[:, 0], 0.0, (squares / (count - 1).clamp(min=1)).sqrt())
        if (count > 1).any():
            metrics["reward/group_std"] = within[count > 1].mean().item()
        metrics["reward/constant_groups"] = is_same.float().mean().item()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([float(each.num_policy_tokens) for each in rollouts])
    is_cut = torch.tensor([any(row.is_truncated for row in each.rows) for each in rollouts])
    prompt_lengths = torch.tensor([float(len(each.prompt_token_ids)) for each in rollouts])
    metrics |= _spread("prompt/length", prompt_lengths)
    metrics |= _spread("completion/length", lengths)
    metrics |= _spread("completion/terminated_length", lengths[~is_cut])
    metrics["completion/truncated"] = is_cut.float().mean().item()
    num_turns = sum(each.num_turns + sum(len(row.turn_places) for row in each.branches) for each in rollouts)
    metrics["rollout/turns_mean"] = num_turns / len(rollouts)
    metrics["rollout/rows_mean"] = sum(len(each.rows) for each in rollouts) / len(rollouts)
    metrics["rollout/replayed"] = 1 - sum(not each.is_replayed for each in rollouts) / len(rollouts)
    # Dropped groups are not trained on, so their age does not matter.
    trained = [rollout for group in kept_groups(groups) for rollout in group.rollouts]
    return metrics | _staleness([each for each in trained if not each.is_replayed], step, oldest_version)


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Describe what is trained on."""
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
    """Describe how far the log-probabilities of trainer and engine differ; `band` as for `correction_metrics`."""
    gap = (old_logprobs - batch.sampler_logprobs)[batch.mask].abs()
    metrics = {"sampler/logprob_gap_mean": gap.mean().item(), "sampler/logprob_gap_max": gap.max().item()}
    return metrics | correction_metrics(old_logprobs, batch.sampler_logprobs, batch.mask, *band)


def correction_effect(
    before: RolloutBatch, after: RolloutBatch, weights: torch.Tensor | None
) -> dict[str, float]:
    """Describe what a correction rejected, and its weights after their bounds."""
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
    """Count the log-ratios of trainer and engine by size and by position, for the picture that a run leaves.

    Returns:
        ``histogram``, the tokens in each bin from ``lowest`` to ``highest``; ``tokens`` and ``out_of_band`` in each bin
        of positions in a completion, and ``tokens_per_place``, the width of these bins.
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
    """Turns the times of a step into speeds; its only state that outlives a step is `tokens_seen`."""

    def __init__(self, models: RLModels, peak_flops: float | None = None) -> None:
        """Count the weights that every token is multiplied with; `peak_flops` is what all devices could do."""
        policy: Any = models.policy.model
        self._num_weights = num_multiplied(policy, bool(policy.config.tie_word_embeddings))
        if models.critic is not None:
            self._num_weights += num_multiplied(models.critic.model, has_tied_head=False)
        self._peak_flops = peak_flops
        self._device = models.policy_step.topology.device
        self._swapped_at: float | None = None
        self.tokens_seen = 0
        """Tokens of prompts and completions that the whole run has sampled."""

    def engine_idle(self, busy: Sequence[tuple[float, float]], swapped_at: float | None) -> dict[str, float]:
        """Return the share of the time between the last two swaps in which the engine computed nothing."""
        before, self._swapped_at = self._swapped_at, swapped_at
        if not busy or before is None or swapped_at is None or swapped_at == before:
            return {}
        busy_s = sum(end - max(start, before) for start, end in busy if end > before)
        return {"perf/engine_idle": 1 - busy_s / (swapped_at - before)}

    def speeds(
        self, times: Mapping[str, float], metrics: Mapping[str, float], groups: Sequence[RolloutGroup]
    ) -> dict[str, float]:
        """Return what was done per second of a step, whose rollouts are in `groups`."""
        found: dict[str, float] = {}
        if groups:
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            generated = sum(each.num_policy_tokens for each in rollouts)
            read = sum(len(row.prompt_token_ids) for each in rollouts for row in each.rows)
            self.tokens_seen += generated + read
            found["perf/tokens_seen"] = float(self.tokens_seen)
            found["perf/tokens_per_s"] = (generated + read) / times["time/step_s"]
            found["perf/generated_tokens_per_s"] = generated / times["time/generate_s"]
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
        """Start empty."""
        self._topology = topology
        self._num_tokens = 1
        self._sums: dict[str, torch.Tensor] = {}
        self._largest: dict[str, torch.Tensor] = {}
        self._history: dict[str, list[float]] = {}

    def begin_step(self, num_tokens: int) -> None:
        """Begin an optimizer step with this number of tokens on all ranks, the denominator of means over tokens."""
        self._num_tokens = num_tokens
        self._sums = {}
        self._largest = {}

    def add(self, name: str, share: torch.Tensor) -> None:
        """Add the term of one micro-batch to a sum."""
        # Ranks that share rows add the same terms.
        share = share.detach().double() / self._topology.context_parallel
        self._sums[name] = self._sums[name] + share if name in self._sums else share

    def add_tokens(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the masked values [B, T] of a micro-batch to a mean over all tokens of the step."""
        self.add(name, torch.where(mask, values, 0.0).sum() / self._num_tokens)

    def add_largest(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Record the largest value of a token, at least 0."""
        largest = torch.where(mask, values, 0.0).max().detach().double()
        self._largest[name] = torch.maximum(self._largest.get(name, largest), largest)

    def note(self, name: str, value: float) -> None:
        """Record a value that all ranks have."""
        self._history.setdefault(name, []).append(value)

    def note_all(self, prefix: str, values: Mapping[str, float]) -> None:
        """Record values that all ranks have, each as ``prefix/name``."""
        for name, value in values.items():
            self.note(f"{prefix}/{name}", value)

    def end_step(self) -> dict[str, float]:
        """Return the values of the step, summed over the ranks; every rank has added the same names."""
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
        """Return the mean of each metric over the optimizer steps; of largest values, the largest."""
        return {
            name: max(values) if name.endswith("_max") else sum(values) / len(values)
            for name, values in self._history.items()
        }


def _staleness(rollouts: Sequence[Rollout], step: int, oldest_version: int | None) -> dict[str, float]:
    """Describe how old the tokens are that are trained on."""
    versions = [each for each in (each.sampled_versions for each in rollouts) if each]
    if not versions:
        return {}
    lags = [step - version for each in versions for version in each]
    spans = [max(each) - min(each) for each in versions]
    masked = {}
    if oldest_version is not None:
        masked["staleness/masked_tokens"] = sum(lag > step - oldest_version for lag in lags) / len(lags)
    return masked | {
        "staleness/token_max": float(max(lags)),
        "staleness/token_mean": sum(lags) / len(lags),
        "staleness/sequence_max": float(max(spans)),
        "staleness/mixed_sequences": sum(span > 0 for span in spans) / len(spans),
    }


def _spread(name: str, values: torch.Tensor, *which: str, separator: str | None = None) -> dict[str, float]:
    """Return mean, min and max of the numbers that are there; nothing where there are none."""
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
    return {f"{name}{between}{each}": found[each].item() for each in which or ("mean", "min", "max")}
