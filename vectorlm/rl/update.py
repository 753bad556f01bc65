"""What one batch of rollouts does to the weights: epochs, mini-batches, optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from vectorlm.algorithms.batch import LossInputs
from vectorlm.algorithms.critic import value_loss
from vectorlm.algorithms.kl import exp_clamped, kl_estimate, log_ratio, ratio
from vectorlm.algorithms.logprobs import EntropyKind
from vectorlm.algorithms.reduce import count_denominator, masked_mean, masked_sum, reduce_loss
from vectorlm.algorithms.settings import ClipSettings, LevelSettings, Reduction, ReductionSettings
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.rl.batch import TrainBatch
from vectorlm.rl.metrics import MetricAccumulator
from vectorlm.rl.micro_batch import MicroBatch, map_rows, micro_batches_of
from vectorlm.rl.models import RLModels, Teacher
from vectorlm.rl.prepare import weights_in_update
from vectorlm.rl.prompts import Demonstrations
from vectorlm.rl.settings import StepSettings
from vectorlm.types import Batch


@dataclass(frozen=True)
class MiniBatch:
    """The groups of one optimizer step, as this rank's micro-batches; the counts are of all ranks."""

    groups: Sequence[int]
    micro_batches: Sequence[MicroBatch]
    denominator: int
    """What the losses are divided by."""
    num_tokens: int
    """Tokens that are trained on."""
    num_units: int
    """Completions that are trained on, or groups where the loss is of groups."""
    num_computed: int
    """Tokens that all ranks compute, without padding."""


@dataclass(frozen=True)
class Updater:
    """Trains policy and critic on batches of rollouts; called on all ranks.

    Loss and gradient of an optimizer step are sums over its tokens or completions, on all ranks and in all
    micro-batches, over one denominator: how the rows are split changes nothing but rounding.
    """

    models: RLModels
    spec: AlgorithmSpec
    settings: StepSettings
    topology: Topology
    demonstrations: Demonstrations | None = None
    """Texts that the policy learns as well."""

    def update(
        self, batch: TrainBatch, step: int, *, kl_coef: float = 0.0, trains_policy: bool = True
    ) -> dict[str, float]:
        """Train on a batch, and return metrics, averaged over the optimizer steps.

        `step` decides the order of groups. The loss has a KL penalty with the weight `kl_coef`; without
        `trains_policy` the critic is trained alone.

        Raises:
            NonFiniteLoss: A loss or a gradient norm is NaN or infinite; that step changed no weights.
            ConfigError: A row exceeds the micro-batch budget.
        """
        accumulator = MetricAccumulator(self.topology)
        is_stopped = False
        num_steps = num_tokens = num_passes = 0
        for index, mini_batch in enumerate(self._mini_batches(batch, step)):
            if trains_policy:
                kl, grad_norm = self._train_policy(batch, mini_batch, (step, index), kl_coef, accumulator)
                is_stopped = self.settings.update.max_kl is not None and kl > self.settings.update.max_kl
                num_steps += grad_norm > 0
            if self.models.critic is not None:
                self._train_critic(batch, mini_batch, step, accumulator)
            num_tokens += mini_batch.num_computed
            num_passes += len(mini_batch.micro_batches)
            if is_stopped:
                break
        if self._learns_distributions:
            self.models.reshard()
        return accumulator.averages() | {
            "policy/optimizer_steps": float(num_steps),
            "policy/stopped_early": float(is_stopped),
            "perf/trained_tokens": float(num_tokens),
            "balance/micro_batches": float(num_passes),
        }

    def follow_run(self, num_batches: int) -> None:
        """Set the learning rates by the position in the run, after `num_batches` batches, trained on or not."""
        update, critic = self.settings.update, self.models.critic_step
        warmup_steps = 0 if critic is None else self.settings.critic.warmup_steps
        for optimizer_step, left_out in ((self.models.policy_step, warmup_steps), (critic, 0)):
            if optimizer_step is not None and optimizer_step.schedule is not None:
                num_steps = update.steps_per_batch * (num_batches - left_out)
                optimizer_step.schedule.go_to(num_steps)

    @property
    def _reduction(self) -> Reduction:
        hparams = self.settings.hparams
        return hparams.reduction if isinstance(hparams, ReductionSettings) else "token_mean"

    @property
    def _reads_rollouts(self) -> bool:
        """Whether the loss of a token reads the other tokens of its rollout."""
        hparams = self.settings.hparams
        of_rollouts = isinstance(hparams, LevelSettings) and hparams.importance_sampling_level == "sequence"
        return of_rollouts or self.spec.level == "completion" or self.spec.reads_weights

    @property
    def _learns_distributions(self) -> bool:
        return self.settings.teacher is not None and self.settings.teacher.kind == "full"

    def _mini_batches(self, batch: TrainBatch, step: int) -> Iterator[MiniBatch]:
        settings, rows = self.settings.update, batch.rows
        # Groups that have no token to train on are left out: a step on them alone would move the weights by momentum.
        is_trained = rows.mask.any(dim=1).view(-1, rows.rows_per_group).any(dim=1)
        trained = torch.nonzero(is_trained)[:, 0].tolist()
        for epoch in range(settings.num_epochs):
            generator = np.random.default_rng((self.settings.seed, step, epoch))
            order = generator.permutation(trained).tolist()
            for index in range(settings.num_mini_batches):
                groups = sorted(order[index :: settings.num_mini_batches])
                if groups:
                    micro_batches, num_computed = micro_batches_of(
                        rows,
                        groups,
                        self.topology,
                        max_tokens=settings.max_tokens_per_micro_batch,
                        packs=self.models.why_padded is None,
                        keep_groups_whole=self.spec.level == "group",
                    )
                    yield MiniBatch(groups, micro_batches, *self._count(batch, groups), num_computed)

    def _train_policy(
        self,
        batch: TrainBatch,
        mini_batch: MiniBatch,
        place: tuple[int, int],
        kl_coef: float,
        accumulator: MetricAccumulator,
    ) -> tuple[float, float]:
        """Make one step of the policy; return its divergence from the rollout's policy, and the gradient's norm.

        `place` is the step of the run, and which optimizer step of the batch this is.
        """
        micro_batches = mini_batch.micro_batches
        accumulator.begin_step(mini_batch.num_tokens)
        tokens = sum(each.num_tokens for each in micro_batches if not each.is_filler)
        here = torch.tensor([tokens / self.topology.context_parallel], device=self.topology.device)
        accumulator.add("balance/rank_tokens_mean", here[0] / self.topology.num_data_shares)
        accumulator.add_largest("balance/rank_tokens_max", here, here > 0)
        optimizer_step, (step, index_in_batch) = self.models.policy_step, place
        share, num_targets = 0.0, 0
        texts: list[Batch] = []
        if self.demonstrations is not None:
            share = self.demonstrations.share(step)
            before = step * self.settings.update.steps_per_batch
            texts, num_targets = self.demonstrations.micro_batches(before + index_in_batch)
        last = len(micro_batches) + len(texts) - 1
        now = self._logprobs_now(batch, mini_batch)
        for index, micro_batch in enumerate(micro_batches):
            loss = self._policy_loss(batch, micro_batch, mini_batch, kl_coef, accumulator, now)
            optimizer_step.backward((1 - share) * loss, is_last=index == last)
            accumulator.add("policy/loss", loss)
        for index, text in enumerate(texts, len(micro_batches)):
            assert self.demonstrations is not None
            loss = self.demonstrations.loss(text, num_targets)
            optimizer_step.backward(share * loss, is_last=index == last)
            accumulator.add("sft/loss", loss)
        sums = accumulator.end_step()
        for name in ("policy/loss", "sft/loss") if texts else ("policy/loss",):
            optimizer_step.require_finite(sums[name], step)
        finished = optimizer_step.finish(step)
        accumulator.note_all("policy", finished)
        return sums["policy/kl"], finished["grad_norm"]

    def _policy_loss(
        self,
        batch: TrainBatch,
        micro_batch: MicroBatch,
        mini_batch: MiniBatch,
        kl_coef: float,
        accumulator: MetricAccumulator,
        now: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the loss of one micro-batch, as a share of the loss of the whole step."""
        entropy_coef, kl, teacher = self.settings.update.entropy_coef, self.settings.kl, self.settings.teacher
        rows = micro_batch.inputs_of(batch.rows)
        compare = None
        if self._learns_distributions:
            assert teacher is not None
            assert isinstance(self.models.teacher, Teacher)
            compare = self.models.teacher.comparison(rows, teacher.beta)
        entropy_kind: EntropyKind = "gradient" if entropy_coef > 0 else "value"
        logprobs, entropy, outside, compared = self.models.policy(rows, entropy_kind, compare)
        inputs = self._loss_inputs(batch, micro_batch, logprobs)
        rollouts = self._whole_rollouts(batch, micro_batch, inputs, now)
        losses = self.spec.loss(rollouts, self.settings.hparams)
        self._require_shape(losses, rollouts)
        # Each row of a rollout has the gradient of its own tokens, and their share of the rollout's loss and metrics.
        lengths = shares = None
        if batch.rows.owners is not None:
            lengths = batch.rows.lengths[micro_batch.rows].to(micro_batch.device)
            shares = inputs.mask.sum(dim=1) / lengths.clamp(min=1)
            if self.spec.level == "completion":
                losses = losses + (shares - 1) * losses.detach()
            losses = losses[:, : inputs.mask.shape[1]] if self.spec.level == "token" else losses
        losses = self._weighted(losses, batch, micro_batch, inputs)
        losses = self._without_others(losses, batch, micro_batch, inputs, accumulator)
        # Penalty and bonus have a value for each token: they are reduced as the losses of tokens are, if there are any.
        if self.spec.level == "token":
            how, count = self._reduction, mini_batch.denominator
            loss = reduce_loss(losses, inputs.mask, how, count, lengths)
        else:
            how, count = "token_mean", mini_batch.num_tokens
            units = inputs.mask.any(dim=1).view(len(losses), -1).any(dim=1, keepdim=True)
            loss = reduce_loss(losses[:, None], units, "token_mean", mini_batch.denominator)
        if kl_coef > 0 and inputs.reference_logprobs is not None:
            penalty = kl_estimate(logprobs, inputs.reference_logprobs, kl.kl_kind, kl.kl_straight_through)
            if kl.kl_importance_weights:
                penalty = penalty * ratio(logprobs, inputs.old_logprobs)
            penalty = reduce_loss(penalty, inputs.mask, how, count, lengths)
            accumulator.add("policy/kl_loss", penalty)
            loss = loss + kl_coef * penalty
        if entropy_coef > 0:
            bonus = (
                entropy if batch.learns is None else torch.where(micro_batch.cut(batch.learns), entropy, 0.0)
            )
            loss = loss - entropy_coef * reduce_loss(bonus, inputs.mask, how, count, lengths)
        if compared is not None:
            assert teacher is not None
            divergence, reverse = compared.unbind(-1)
            penalty = reduce_loss(divergence, inputs.mask, how, count, lengths)
            accumulator.add("teacher/loss", penalty)
            accumulator.add_tokens("teacher/kl", reverse, inputs.mask)
            loss = loss + teacher.coef * penalty
        elif batch.teacher_logprobs is not None:
            reverse = kl_estimate(logprobs.detach(), micro_batch.cut(batch.teacher_logprobs), "k1")
            accumulator.add_tokens("teacher/kl", reverse, inputs.mask)
        self._observe(inputs, rollouts, shares, entropy, mini_batch.num_units, accumulator)
        if not self.models.policy.support.is_whole:
            accumulator.add_tokens("sampler/outside_support", outside, inputs.mask)
        if batch.old_logprobs is None:
            # The only forward pass of the trainer with the weights that sampled these tokens.
            gap = (logprobs.detach() - micro_batch.cut(batch.rows.sampler_logprobs)).abs()
            accumulator.add_tokens("sampler/logprob_gap_mean", gap, inputs.mask)
            accumulator.add_largest("sampler/logprob_gap_max", gap, inputs.mask)
        return loss

    def _require_shape(self, losses: torch.Tensor, inputs: LossInputs) -> None:
        """Raise unless there is one loss for each token, completion or group of `inputs`."""
        num_rows = len(inputs.mask)
        wanted = {
            "token": (*inputs.mask.shape,),
            "completion": (num_rows,),
            "group": (num_rows // inputs.rows_per_group,),
        }[self.spec.level]
        if losses.shape != wanted:
            # Broadcast, it would be averaged over the wrong number, which depends on the micro-batches.
            raise ConfigError(
                f"the loss of the algorithm {self.spec.name!r} has the shape {tuple(losses.shape)}: with "
                f"level={self.spec.level!r} it must be {wanted}, one value for each {self.spec.level}."
            )

    def _loss_inputs(self, batch: TrainBatch, micro_batch: MicroBatch, logprobs: torch.Tensor) -> LossInputs:
        def cut(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else micro_batch.cut(x)

        old, mask = cut(batch.old_logprobs), micro_batch.mask_of(batch.rows)
        log_weights = None
        if self.spec.reads_weights and batch.rows.weights is not None:
            to_row = masked_mean if self.settings.correction.weighs_rows else masked_sum
            if (owners := batch.rows.owners) is None:
                log_weights = to_row(micro_batch.cut(batch.rows.weights).log(), mask)
            else:
                of_rows = to_row(batch.rows.weights.log(), batch.rows.mask)
                of_rollouts = torch.zeros_like(of_rows).index_add(0, owners, of_rows)[owners]
                log_weights = of_rollouts[micro_batch.rows].to(micro_batch.device)
        return LossInputs(
            policy_logprobs=logprobs,
            old_logprobs=logprobs.detach() if old is None else old,
            reference_logprobs=cut(batch.reference_logprobs),
            advantages=micro_batch.cut(batch.advantages),
            rewards=batch.rows.rewards.view(-1)[micro_batch.rows].to(micro_batch.device),
            mask=mask,
            rows_per_group=batch.rows.rows_per_group,
            marked=cut(batch.marked),
            log_weights=log_weights,
        )

    def _logprobs_now(self, batch: TrainBatch, mini_batch: MiniBatch) -> torch.Tensor | None:
        """Return the policy's log-probabilities [B, T] of all rows of a step, where `_whole_rollouts` needs them."""
        if batch.rows.owners is None or batch.old_logprobs is None or not self._reads_rollouts:
            return None
        found = map_rows(
            batch.rows,
            self.models.policy.logprobs,
            self.topology,
            max_tokens=self.settings.update.max_tokens_per_micro_batch,
            packs=self.models.why_padded is None,
            groups=mini_batch.groups,
        )
        self.models.reshard()
        return found

    def _whole_rollouts(
        self, batch: TrainBatch, micro_batch: MicroBatch, inputs: LossInputs, now: torch.Tensor | None
    ) -> LossInputs:
        """Put the tokens of a rollout's other rows, as constants, behind each row, for losses that read them.

        The other rows may be in other micro-batches, so their log-probabilities come from a pass of their own. In the
        only optimizer step of a batch they are the old ones, and any numbers that are equal will do.
        """
        owners, mask = batch.rows.owners, batch.rows.mask
        if owners is None or not self._reads_rollouts:
            return inputs
        others = []
        for row in micro_batch.rows.tolist():
            rows = torch.nonzero((owners == owners[row]) & (torch.arange(len(owners)) != row))[:, 0]
            index, place = torch.nonzero(mask[rows], as_tuple=True)
            others.append(rows[index] * mask.shape[1] + place)
        places = pad_sequence(others, batch_first=True, padding_value=-1)

        def joined(own: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor:
            assert whole is not None
            return torch.cat([own, whole.flatten()[places.clamp(min=0)].to(own)], dim=1)

        sampler, reference, marked = batch.rows.sampler_logprobs, inputs.reference_logprobs, inputs.marked
        old = sampler if batch.old_logprobs is None else batch.old_logprobs
        return replace(
            inputs,
            policy_logprobs=joined(inputs.policy_logprobs, sampler if now is None else now),
            old_logprobs=joined(inputs.old_logprobs, old),
            reference_logprobs=None if reference is None else joined(reference, batch.reference_logprobs),
            advantages=joined(inputs.advantages, batch.advantages),
            mask=torch.cat([inputs.mask, (places >= 0).to(inputs.mask.device)], dim=1),
            marked=None if marked is None else joined(marked, batch.marked),
        )

    def _weighted(
        self, losses: torch.Tensor, batch: TrainBatch, micro_batch: MicroBatch, inputs: LossInputs
    ) -> torch.Tensor:
        """Multiply losses by the weights of the correction; all tokens of a completion have its weight."""
        if self.settings.correction.bypass:
            sampler = micro_batch.cut(batch.rows.sampler_logprobs)
            weights = weights_in_update(
                self.settings.correction, inputs.policy_logprobs, sampler, inputs.mask
            )
        else:
            weights = None if batch.rows.weights is None else micro_batch.cut(batch.rows.weights)
        if weights is None or self.spec.reads_weights:
            return losses
        if self.spec.level == "token":
            return losses * weights
        # Other tokens, prompts among them, have weights that say nothing about the completion.
        return losses * torch.where(inputs.mask, weights, 0.0).amax(dim=1)

    def _without_others(
        self,
        losses: torch.Tensor,
        batch: TrainBatch,
        micro_batch: MicroBatch,
        inputs: LossInputs,
        accumulator: MetricAccumulator,
    ) -> torch.Tensor:
        """Set losses to 0 that the policy is not to learn from; they stay in the denominators."""
        if batch.learns is not None:
            losses = torch.where(micro_batch.cut(batch.learns), losses, 0.0)
        bound, mask = self.settings.update.off_policy_mask, inputs.mask
        if bound is None:
            return losses
        gaps = micro_batch.cut(batch.rows.sampler_logprobs) - inputs.policy_logprobs.detach()
        divergence = masked_mean(gaps.nan_to_num(nan=0.0), mask)[:, None]
        is_far = (divergence > bound) & (masked_mean(inputs.advantages, mask)[:, None] < 0)
        accumulator.add_tokens("policy/off_policy_masked", is_far.float().expand_as(mask), mask)
        return torch.where(is_far if self.spec.level == "token" else is_far[:, 0], 0.0, losses)

    def _count(self, batch: TrainBatch, groups: Sequence[int]) -> tuple[int, int, int]:
        """Count over the whole optimizer step: the denominator of its losses, its tokens, its completions or groups."""
        rows = batch.rows
        mask = rows.mask.view(-1, rows.rows_per_group, rows.mask.shape[1])[list(groups)]
        is_trained = rows.trained_rollouts.view(-1, rows.rows_per_group)[list(groups)]
        count = units = int((is_trained.any(dim=1) if self.spec.level == "group" else is_trained).sum())
        if self.spec.level == "token":
            counted = mask.flatten(0, 1) if self._reduction == "token_mean" else is_trained.view(-1, 1)
            count = count_denominator(counted, self._reduction, self.settings.max_tokens)
        return max(count, 1), max(int(mask.sum()), 1), max(units, 1)

    @torch.no_grad()
    def _observe(
        self,
        inputs: LossInputs,
        rollouts: LossInputs,
        shares: torch.Tensor | None,
        entropy: torch.Tensor,
        num_units: int,
        accumulator: MetricAccumulator,
    ) -> None:
        """Add the metrics of a micro-batch: of its tokens, and the algorithm's own of completions or groups."""
        mask = inputs.mask
        ratios = ratio(inputs.policy_logprobs, inputs.old_logprobs)
        accumulator.add_tokens("policy/entropy", entropy, mask)
        # The old policy drew these tokens, so they estimate its divergence from the new one.
        divergence = kl_estimate(inputs.old_logprobs, inputs.policy_logprobs, "k3")
        accumulator.add_tokens("policy/kl", divergence, mask)
        accumulator.add_tokens("policy/ratio_mean", ratios, mask)
        accumulator.add_largest("policy/ratio_max", ratios, mask)
        if self.spec.clips is not None:
            self._observe_clip(inputs, rollouts, accumulator)
        if inputs.reference_logprobs is not None:
            divergence = kl_estimate(inputs.policy_logprobs, inputs.reference_logprobs, "k1")
            accumulator.add_tokens("reference/kl", divergence, mask)
        size = inputs.rows_per_group if self.spec.level == "group" else 1
        units = mask.any(dim=1).view(-1, size).any(dim=1)
        for name, values in self.spec.observe(rollouts, self.settings.hparams).items():
            values = values if shares is None else shares * values
            accumulator.add(name, torch.where(units, values, 0.0).sum() / num_units)

    def _observe_clip(self, inputs: LossInputs, rollouts: LossInputs, accumulator: MetricAccumulator) -> None:
        """Count the tokens that a clipped ratio keeps from learning."""
        hparams, mask = self.settings.hparams, inputs.mask
        assert isinstance(hparams, ClipSettings)
        logs = log_ratio(inputs.policy_logprobs, inputs.old_logprobs)
        of_rollouts = log_ratio(rollouts.policy_logprobs, rollouts.old_logprobs)
        if self.spec.clips == "sum":
            logs = masked_sum(of_rollouts, rollouts.mask)[:, None]
        elif isinstance(hparams, LevelSettings) and hparams.importance_sampling_level == "sequence":
            logs = masked_mean(of_rollouts, rollouts.mask)[:, None]
        clipped = exp_clamped(logs).expand_as(mask)
        low = (clipped < 1 - hparams.clip_low) & (inputs.advantages < 0)
        high = (clipped > 1 + hparams.clip_high) & (inputs.advantages > 0)
        accumulator.add_tokens("policy/clip_low", low.float(), mask)
        accumulator.add_tokens("policy/clip_high", high.float(), mask)
        accumulator.add_tokens("policy/clip_fraction", (low | high).float(), mask)

    def _train_critic(
        self, batch: TrainBatch, mini_batch: MiniBatch, step: int, accumulator: MetricAccumulator
    ) -> None:
        """Make one optimizer step of the critic."""
        critic, optimizer_step = self.models.critic, self.models.critic_step
        values = batch.rows.values
        assert critic is not None
        assert optimizer_step is not None
        assert values is not None
        assert batch.returns is not None
        value_clip = self.settings.critic.value_clip
        accumulator.begin_step(mini_batch.num_tokens)
        for index, micro_batch in enumerate(mini_batch.micro_batches):
            mask = micro_batch.mask_of(batch.rows)
            new, old = critic(micro_batch.inputs_of(batch.rows)), micro_batch.cut(values)
            losses = value_loss(new, old, micro_batch.cut(batch.returns), value_clip)
            loss = reduce_loss(losses, mask, "token_mean", mini_batch.num_tokens)
            optimizer_step.backward(loss, is_last=index == len(mini_batch.micro_batches) - 1)
            accumulator.add("critic/loss", loss)
            if value_clip is not None:
                far = (new.detach() - old).abs() > value_clip
                accumulator.add_tokens("critic/clip_fraction", far.float(), mask)
        sums = accumulator.end_step()
        optimizer_step.require_finite(sums["critic/loss"], step)
        accumulator.note_all("critic", optimizer_step.finish(step))
