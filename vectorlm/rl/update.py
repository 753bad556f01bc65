"""What one batch of rollouts does to the weights: mini-batches, epochs, optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vectorlm.algorithms import count_denominator, kl_estimate, reduce_loss, value_loss
from vectorlm.algorithms.kl import Kind
from vectorlm.algorithms.ratio import exp_clamped, log_ratio, masked_mean, masked_sum, ratio
from vectorlm.algorithms.reduce import How
from vectorlm.algorithms.spec import AlgorithmSpec, Knobs, LossInputs
from vectorlm.errors import NonFiniteLoss
from vectorlm.model.gradient import clip_gradient
from vectorlm.model.schedule import Schedule
from vectorlm.ranks.topology import Topology
from vectorlm.rl.correction import NO_CORRECTION, Correction
from vectorlm.rl.roles import Critic, Policy
from vectorlm.rl.rows import MicroBatch, micro_batches_of
from vectorlm.rl.tally import Tally
from vectorlm.rollout.batch import RolloutBatch


@dataclass(frozen=True)
class TrainBatch:
    """Rollouts with all that the losses need; everything is the same on all ranks, and on the CPU."""

    rows: RolloutBatch
    rewards: torch.Tensor
    """float32 [P, K], less the KL penalty where that is part of the reward."""
    advantages: torch.Tensor
    """float32 [B, T]."""
    old_logprobs: torch.Tensor | None
    """float32 [B, T]; None where the first and only optimizer step makes its own."""
    reference_logprobs: torch.Tensor | None
    """float32 [B, T]."""
    values: torch.Tensor | None
    """float32 [B, T] of the critic."""
    returns: torch.Tensor | None
    """float32 [B, T] that the critic learns."""
    weights: torch.Tensor | None = None
    """float32 [B, T] that the policy's losses are multiplied by; None counts every token once."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the correction found and did."""
    drift: Mapping[str, Any] | None = None
    """Counts of the log-ratios of trainer and engine; see `drift_of`."""


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How a batch is trained on."""

    num_epochs: int
    """Passes over the batch."""
    num_mini_batches: int
    """Optimizer steps of each pass."""
    max_tokens_per_micro_batch: int
    """Tokens of one forward pass on one rank, padding included: never exceeded."""
    reduction: How
    """How losses of tokens become one number."""
    fixed_length: int
    """Tokens that each completion counts for under ``sequence_sum_fixed``."""
    kl_kind: Kind
    """Its estimate."""
    kl_straight_through: bool
    """Whether its gradient is that of k2, whatever the estimate."""
    entropy_coef: float
    """Weight of the entropy bonus; 0 leaves it out."""
    value_clip: float | None
    """Largest useful step of a value; None leaves the clip out."""
    max_grad_norm: float
    """Norm above which the policy's gradient is scaled down."""
    critic_max_grad_norm: float
    """Norm above which the critic's gradient is scaled down."""
    max_kl: float | None
    """Divergence from the rollout's policy (k3 per token) at which the rest of the batch is left; None goes on."""
    seed: int
    """With the step and the epoch, this decides which groups share a mini-batch."""


class Updater:
    """Trains policy and critic on batches of rollouts; called on all ranks.

    Loss and gradient of an optimizer step are sums over its tokens or completions, on all ranks and in all
    micro-batches, over one denominator: how the rows are split changes nothing but rounding.
    """

    def __init__(
        self,
        policy: Policy,
        policy_optimizer: torch.optim.Optimizer,
        critic: Critic | None,
        critic_optimizer: torch.optim.Optimizer | None,
        *,
        spec: AlgorithmSpec,
        knobs: Knobs,
        settings: UpdateSettings,
        topology: Topology,
        correction: Correction = NO_CORRECTION,
        policy_schedule: Schedule | None = None,
        critic_schedule: Schedule | None = None,
    ) -> None:
        """Take everything that an update needs.

        Args:
            policy: The trained model.
            policy_optimizer: Over its trainable parameters.
            critic: For algorithms that need one.
            critic_optimizer: Over its parameters.
            spec: The algorithm.
            knobs: Its numbers.
            settings: How a batch is trained on.
            topology: This rank's place.
            correction: Makes the weights of the policy as it is now, where they are made that late.
            policy_schedule: Stepped after each optimizer step of the policy; None leaves its learning rate alone.
            critic_schedule: The same for the critic.
        """
        self._policy, self._policy_optimizer = policy, policy_optimizer
        self._critic, self._critic_optimizer = critic, critic_optimizer
        self._spec, self._knobs, self._settings = spec, knobs, settings
        self._topology, self._correction = topology, correction
        self._policy_schedule, self._critic_schedule = policy_schedule, critic_schedule

    def update(
        self, batch: TrainBatch, step: int, *, kl_coef: float = 0.0, trains_policy: bool = True
    ) -> dict[str, float]:
        """Train on a batch.

        Args:
            batch: The rollouts.
            step: The training step, for the order of groups and for errors.
            kl_coef: Weight of the divergence from the reference in the loss; 0 leaves it out.
            trains_policy: False lets the critic alone learn.

        Returns:
            Metrics, averaged over the optimizer steps.

        Raises:
            NonFiniteLoss: A loss or a gradient norm is NaN or infinite; that step changed no weights.
            ConfigError: A row exceeds the micro-batch budget.
        """
        tally, num_steps, num_tokens, is_stopped = Tally(self._topology), 0, 0, False
        for groups in self._mini_batches(batch, step):
            parts = micro_batches_of(
                batch.rows,
                groups,
                self._topology,
                max_tokens=self._settings.max_tokens_per_micro_batch,
                keep_groups_whole=self._spec.level == "group",
            )
            if trains_policy:
                kl = self._train_policy(batch, groups, parts, step, kl_coef, tally)
                limit = self._settings.max_kl
                is_stopped = limit is not None and kl > limit
            if self._critic is not None:
                self._train_critic(batch, groups, parts, step, tally)
            num_steps += trains_policy
            size = batch.rows.rows_per_group
            num_tokens += sum(
                sum(batch.rows.num_tokens[group * size : (group + 1) * size]) for group in groups
            )
            if is_stopped:
                break
        return tally.averages() | {
            "policy/optimizer_steps": float(num_steps),
            "policy/stopped_early": float(is_stopped),
            "perf/trained_tokens": float(num_tokens),
        }

    def _mini_batches(self, batch: TrainBatch, step: int) -> Iterator[list[int]]:
        # A group of which nothing is trained on has no part in any step: of such groups alone, a step would move the
        # weights by its momentum.
        rows = batch.rows.mask.any(dim=1).view(len(batch.rewards), -1)
        trained, count = torch.nonzero(rows.any(dim=1))[:, 0].tolist(), self._settings.num_mini_batches
        for epoch in range(self._settings.num_epochs):
            generator = np.random.default_rng((self._settings.seed, step, epoch))
            order = generator.permutation(trained).tolist()
            for index in range(count):
                groups = sorted(order[index::count])
                if groups:
                    yield groups

    def _train_policy(
        self,
        batch: TrainBatch,
        groups: Sequence[int],
        parts: Sequence[MicroBatch],
        step: int,
        kl_coef: float,
        tally: Tally,
    ) -> float:
        """Make one optimizer step of the policy; return how far it has moved from the rollout's."""
        denominator, num_tokens = self._denominators(batch, groups)
        tally.begin_step(num_tokens)
        work = sum(len(part.rows) * part.length for part in parts if not part.is_filler)
        here = torch.tensor([float(work)], device=self._topology.device)
        tally.add("balance/rank_tokens_mean", here[0] / self._topology.world_size)
        tally.add_largest("balance/rank_tokens_max", here, here > 0)
        for index, part in enumerate(parts):
            self._sync_last(self._policy.model, index, len(parts))
            loss = self._policy_loss(batch, part, (denominator, num_tokens), kl_coef, tally)
            # FSDP averages gradients over ranks; the loss is already a share of the whole step's.
            (loss * self._topology.world_size).backward()
            tally.add("policy/loss", loss)
        sums = tally.end_step()
        self._require_finite(sums["policy/loss"], "policy", step)
        norm = self._clip(self._policy.model, self._settings.max_grad_norm, "policy", step)
        tally.note("policy/grad_norm", norm)
        tally.note("policy/learning_rate", self._policy_optimizer.param_groups[0]["lr"])
        self._policy_optimizer.step()
        self._policy_optimizer.zero_grad()
        if self._policy_schedule is not None:
            self._policy_schedule.step()
        return sums["policy/kl"]

    def _policy_loss(
        self, batch: TrainBatch, part: MicroBatch, counts: tuple[int, int], kl_coef: float, tally: Tally
    ) -> torch.Tensor:
        denominator, num_tokens = counts
        settings, mask = self._settings, part.mask_of(batch.rows)
        scores = self._policy(
            part.cut(batch.rows.input_ids),
            part.cut(batch.rows.attention_mask),
            part.first,
            entropy_has_gradient=settings.entropy_coef > 0,
        )
        old = scores.logprobs.detach() if batch.old_logprobs is None else part.cut(batch.old_logprobs)
        reference = None if batch.reference_logprobs is None else part.cut(batch.reference_logprobs)
        inputs = LossInputs(
            policy_logprobs=scores.logprobs,
            old_logprobs=old,
            reference_logprobs=reference,
            advantages=part.cut(batch.advantages),
            rewards=batch.rewards.view(-1)[part.rows].to(part.device),
            mask=mask,
            rows_per_group=batch.rows.rows_per_group,
        )
        losses = self._spec.loss(inputs, self._knobs)
        loss = self._reduced(self._weighed(losses, batch, part, inputs), mask, denominator)
        # Both have a value for each token: they are reduced as the losses of tokens are, where the algorithm has such.
        how, count = (
            (settings.reduction, denominator) if self._spec.level == "token" else ("token_mean", num_tokens)
        )
        if kl_coef > 0 and reference is not None:
            penalty = kl_estimate(scores.logprobs, reference, settings.kl_kind, settings.kl_straight_through)
            penalty = reduce_loss(penalty, mask, how, count)
            tally.add("policy/kl_loss", penalty)
            loss = loss + kl_coef * penalty
        if settings.entropy_coef > 0:
            loss = loss - settings.entropy_coef * reduce_loss(scores.entropy, mask, how, count)
        self._observe(inputs, scores.entropy, tally)
        self._observe_units(inputs, denominator, tally)
        if batch.old_logprobs is None:
            # The only look that the trainer takes at these tokens with the weights that sampled them.
            gap = (scores.logprobs.detach() - part.cut(batch.rows.sampler_logprobs)).abs()
            tally.add_tokens("sampler/logprob_gap_mean", gap, mask)
            tally.add_largest("sampler/logprob_gap_max", gap, mask)
        return loss

    def _weighed(
        self, losses: torch.Tensor, batch: TrainBatch, part: MicroBatch, inputs: LossInputs
    ) -> torch.Tensor:
        """Multiply losses by the correction's weights; a completion's is that of any of its tokens."""
        if batch.weights is not None:
            weights: torch.Tensor | None = part.cut(batch.weights)
        else:
            sampler = part.cut(batch.rows.sampler_logprobs)
            weights = self._correction.weights_in_update(inputs.policy_logprobs, sampler, inputs.mask)
        if weights is None:
            return losses
        return losses * (weights if self._spec.level == "token" else weights.amax(dim=1))

    def _reduced(self, losses: torch.Tensor, mask: torch.Tensor, denominator: int) -> torch.Tensor:
        if self._spec.level == "token":
            return reduce_loss(losses, mask, self._settings.reduction, denominator)
        units = mask.any(dim=1).view(len(losses), -1).any(dim=1, keepdim=True)
        return reduce_loss(losses[:, None], units, "token_mean", denominator)

    def _denominators(self, batch: TrainBatch, groups: Sequence[int]) -> tuple[int, int]:
        """Count over the whole optimizer step what its losses, and means over its tokens, are divided by."""
        size = batch.rows.rows_per_group
        mask = batch.rows.mask.view(len(batch.rewards), size, -1)[list(groups)]
        num_tokens = max(int(mask.sum()), 1)
        match self._spec.level:
            case "token":
                how, length = self._settings.reduction, self._settings.fixed_length
                count = count_denominator(mask.flatten(0, 1), how, length)
            case "completion":
                count = int(mask.any(dim=2).sum())
            case "group":
                count = int(mask.any(dim=2).any(dim=1).sum())
        return max(count, 1), num_tokens

    @torch.no_grad()
    def _observe(self, inputs: LossInputs, spread: torch.Tensor, tally: Tally) -> None:
        """Count what is worth knowing about the tokens of a micro-batch."""
        mask = inputs.mask
        ratios = ratio(inputs.policy_logprobs, inputs.old_logprobs)
        tally.add_tokens("policy/entropy", spread, mask)
        tally.add_tokens("policy/kl", kl_estimate(inputs.policy_logprobs, inputs.old_logprobs, "k3"), mask)
        tally.add_tokens("policy/ratio_mean", ratios, mask)
        tally.add_largest("policy/ratio_max", ratios, mask)
        if self._spec.clips is not None:
            self._observe_clip(inputs, tally)
        if inputs.reference_logprobs is not None:
            divergence = kl_estimate(inputs.policy_logprobs, inputs.reference_logprobs, "k1")
            tally.add_tokens("reference/kl", divergence, mask)

    @torch.no_grad()
    def _observe_units(self, inputs: LossInputs, denominator: int, tally: Tally) -> None:
        """Count what the algorithm itself has to say of its completions or groups."""
        size = inputs.rows_per_group if self._spec.level == "group" else 1
        units = inputs.mask.any(dim=1).view(-1, size).any(dim=1)
        for name, values in self._spec.observe(inputs, self._knobs).items():
            tally.add(name, torch.where(units, values, 0.0).sum() / denominator)

    def _observe_clip(self, inputs: LossInputs, tally: Tally) -> None:
        """Count the tokens that a clipped ratio keeps from learning."""
        mask, logs = inputs.mask, log_ratio(inputs.policy_logprobs, inputs.old_logprobs)
        if self._spec.clips == "mean":
            logs = masked_mean(logs, mask)[:, None]
        elif self._spec.clips == "sum":
            logs = masked_sum(logs, mask)[:, None]
        clipped = exp_clamped(logs).expand_as(mask)
        low = (clipped < 1 - self._knobs.clip_low) & (inputs.advantages < 0)
        high = (clipped > 1 + self._knobs.clip_high) & (inputs.advantages > 0)
        tally.add_tokens("policy/clip_low", low.float(), mask)
        tally.add_tokens("policy/clip_high", high.float(), mask)
        tally.add_tokens("policy/clip_fraction", (low | high).float(), mask)

    def _train_critic(
        self,
        batch: TrainBatch,
        groups: Sequence[int],
        parts: Sequence[MicroBatch],
        step: int,
        tally: Tally,
    ) -> None:
        """Make one optimizer step of the critic."""
        assert self._critic is not None
        assert self._critic_optimizer is not None
        assert batch.values is not None
        assert batch.returns is not None
        _, num_tokens = self._denominators(batch, groups)
        tally.begin_step(num_tokens)
        for index, part in enumerate(parts):
            self._sync_last(self._critic.model, index, len(parts))
            mask = part.mask_of(batch.rows)
            values = self._critic(part.cut(batch.rows.input_ids), part.cut(batch.rows.attention_mask))
            old, returns = part.cut(batch.values), part.cut(batch.returns)
            losses = value_loss(values, old, returns, self._settings.value_clip)
            loss = reduce_loss(losses, mask, "token_mean", num_tokens)
            (loss * self._topology.world_size).backward()
            tally.add("critic/loss", loss)
            if self._settings.value_clip is not None:
                far = (values.detach() - old).abs() > self._settings.value_clip
                tally.add_tokens("critic/clip_fraction", far.float(), mask)
        sums = tally.end_step()
        self._require_finite(sums["critic/loss"], "critic", step)
        norm = self._clip(self._critic.model, self._settings.critic_max_grad_norm, "critic", step)
        tally.note("critic/grad_norm", norm)
        tally.note("critic/learning_rate", self._critic_optimizer.param_groups[0]["lr"])
        self._critic_optimizer.step()
        self._critic_optimizer.zero_grad()
        if self._critic_schedule is not None:
            self._critic_schedule.step()

    def _sync_last(self, model: Any, index: int, count: int) -> None:
        """Let replicas exchange gradients once, after the last micro-batch."""
        model.set_requires_all_reduce(index == count - 1)

    def _require_finite(self, loss: float, whose: str, step: int) -> None:
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the {whose}'s loss is {loss} at step {step} (over all ranks): training stops before the weights "
                "change. Lower the learning rate, or look at the rewards in rollouts.jsonl."
            )

    def _clip(self, model: Any, max_norm: float, whose: str, step: int) -> float:
        """Scale the gradient of a whole step down, and return its norm before that."""
        value = clip_gradient(model, max_norm)
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"the {whose}'s gradient norm is {value} at step {step} although the loss is finite: training stops "
                "before the weights change. Lower the learning rate, or train without use_mp."
            )
        return value
