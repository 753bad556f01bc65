"""Train on a batch of rollouts: epochs, mini-batches, optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from vectorlm.algorithms.batch import LossInputs, RolloutBatch
from vectorlm.algorithms.critic import value_loss
from vectorlm.algorithms.kl import kl_estimate, ratio
from vectorlm.algorithms.logprobs import Comparison, EntropyKind
from vectorlm.algorithms.reduce import count_denominator, masked_mean, masked_sum, reduce_loss
from vectorlm.algorithms.settings import LevelSettings, Reduction, ReductionSettings
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.errors import ConfigError, ExactnessError
from vectorlm.ranks.engine_ranks import gather
from vectorlm.ranks.topology import Topology
from vectorlm.rl.metrics import MetricAccumulator, add_policy_metrics, first_difference, logprob_gap
from vectorlm.rl.micro_batch import MicroBatch, map_rows, micro_batches_of
from vectorlm.rl.models import RLModels, Teacher, compared_with_top
from vectorlm.rl.prepare import weights_in_update
from vectorlm.rl.prompts import Demonstrations
from vectorlm.rl.rollout import TrainBatch
from vectorlm.rl.settings import StepSettings
from vectorlm.train.packing import to_device
from vectorlm.train.routes import BalanceMeter
from vectorlm.types import Batch


@dataclass(frozen=True)
class MiniBatch:
    """The groups of one optimizer step, cut into this rank's micro-batches; counts are over all ranks."""

    groups: Sequence[int]
    """The groups in the micro-batches; groups of the step without an advantage are left out."""
    micro_batches: Sequence[MicroBatch]
    denominator: int
    """Denominator of the losses, which also counts groups without an advantage."""
    num_tokens: int
    """Number of trained tokens in `groups`."""
    num_units: int
    """Number of trained completions in `groups`; of groups, if the loss has one value per group."""
    num_computed: int
    """Number of tokens that the forward passes compute, without padding."""
    is_first: bool
    """Whether this is the batch's first mini-batch: the policy still has the weights that sampled."""


@dataclass(frozen=True)
class Updater:
    """Trains policy and critic on batches of rollouts; called on all ranks.

    Loss and gradient of an optimizer step are sums over the tokens or completions of all ranks and micro-batches,
    divided by one global denominator. The split of rows changes only the rounding.
    """

    models: RLModels
    spec: AlgorithmSpec
    settings: StepSettings
    topology: Topology
    demonstrations: Demonstrations | None = None
    """Texts that the policy also learns; None for none."""

    def update(
        self, batch: TrainBatch, step: int, *, kl_coef: float = 0.0, trains_policy: bool = True
    ) -> dict[str, float]:
        """Train on a batch, and return metrics, averaged over the optimizer steps.

        `step` seeds the order of groups, and `kl_coef` is the weight of the KL penalty in the loss. `trains_policy` is
        False while only the critic is trained.

        Raises:
            NonFiniteLoss: A loss or a gradient norm is NaN or infinite; that step changed no weights.
            ConfigError: A row exceeds the micro-batch budget.
            ExactnessError: In exact mode, a log-probability differs from the engine's.
        """
        accumulator = MetricAccumulator(self.topology)
        is_stopped = False
        num_steps = num_tokens = num_passes = 0
        skipped = self._skipped_groups(batch)
        later = self._mini_batches(batch, step, skipped)
        head = [*islice(later, 1)]
        first = {group for one in head for group in one.groups} if trains_policy else set()
        measured = self._gap_of_others(batch, skipped, first)
        for index, mini_batch in enumerate(chain(head, later)):
            if trains_policy:
                kl, grad_norm = self._train_policy(batch, mini_batch, (step, index), kl_coef, accumulator)
                is_stopped = self.settings.update.max_kl is not None and kl > self.settings.update.max_kl
                num_steps += grad_norm > 0
            if self.models.policy.routers is not None:
                # From here on, the policy's weights are not the weights that sampled.
                self.models.policy.routers.compares = False
            if self.models.critic is not None and mini_batch.micro_batches:
                self._train_critic(batch, mini_batch, step, accumulator)
            num_tokens += mini_batch.num_computed
            num_passes += len(mini_batch.micro_batches)
            if is_stopped:
                break
        if self.settings.teacher is not None and self.settings.teacher.kind == "full":
            self.models.reshard()
        return (
            accumulator.averages()
            | measured
            | {
                "policy/skipped_groups": len(skipped) / len(batch.rows.rewards),
                "policy/optimizer_steps": float(num_steps),
                "policy/stopped_early": float(is_stopped),
                "perf/trained_tokens": float(num_tokens),
                "balance/micro_batches": float(num_passes),
            }
        )

    def update_on_texts(self, step: int) -> dict[str, float]:
        """Train on the texts of a step without completions to learn from, and return metrics.

        The loss of the texts keeps its share, as in a batch whose advantages are all 0.

        Raises:
            NonFiniteLoss: A loss or a gradient norm is NaN or infinite; that step changed no weights.
        """
        accumulator, optimizer_step = MetricAccumulator(self.topology), self.models.policy_step
        num_steps = 0
        for index in range(self.settings.update.steps_per_batch):
            accumulator.begin_step(1)
            share, num_targets, texts = self._texts((step, index))
            self._learn_texts(share, num_targets, texts, accumulator)
            optimizer_step.require_finite(accumulator.end_step()["sft/loss"], step)
            finished = optimizer_step.finish(step)
            accumulator.note_all("policy", finished)
            num_steps += finished["grad_norm"] > 0
        return accumulator.averages() | {"policy/optimizer_steps": float(num_steps)}

    def follow_run(self, num_batches: int) -> None:
        """Set the learning rates for the position after `num_batches` batches of the run, trained on or skipped."""
        critic, per_batch = self.models.critic_step, self.settings.update.steps_per_batch
        warmup_steps = 0 if critic is None else self.settings.critic.warmup_steps
        for step, left_out in ((self.models.policy_step, warmup_steps), (critic, 0)):
            if step is not None and step.schedule is not None:
                step.schedule.go_to(per_batch * (num_batches - left_out))

    @property
    def _reduction(self) -> Reduction:
        hparams = self.settings.hparams
        return hparams.reduction if isinstance(hparams, ReductionSettings) else "token_mean"

    @property
    def _reads_rollouts(self) -> bool:
        """Whether the loss of a token reads the other tokens of its rollout."""
        hparams, spec = self.settings.hparams, self.spec
        by_sequence = isinstance(hparams, LevelSettings) and hparams.importance_sampling_level == "sequence"
        return by_sequence or spec.level == "completion" or spec.reads_weights

    def _skipped_groups(self, batch: TrainBatch) -> set[int]:
        """Return the groups with tokens to train on whose loss and gradient are 0, because all advantages are 0."""
        settings, models = self.settings, self.models
        has_other_loss = (
            settings.update.entropy_coef > 0
            or models.critic is not None
            or models.reference is not None
            or (models.policy.routers is not None and models.policy.routers.balance_coef > 0)
            or (settings.teacher is not None and settings.teacher.kind == "full")
        )
        if has_other_loss or not self.spec.scales_with_advantage:
            return set()
        size, mask = batch.rows.rows_per_group, batch.rows.mask
        has_tokens, has_advantage = (
            rows.any(dim=1).view(-1, size).any(dim=1) for rows in (mask, mask & (batch.advantages != 0))
        )
        return {*torch.nonzero(has_tokens & ~has_advantage)[:, 0].tolist()}

    def _gap_of_others(self, batch: TrainBatch, skipped: Set[int], measured: Set[int]) -> dict[str, float]:
        """Return the difference between engine and trainer in groups outside the first optimizer step.

        That step compares the groups in `measured`. In exact mode, this compares all other groups. Otherwise it
        compares one group, if no pass of the update compares any.

        Raises:
            ExactnessError: In exact mode, a log-probability differs.
        """
        rows, is_exact = batch.rows, self.settings.exact
        trained = {*_trained_groups(rows)}
        groups = sorted(trained - measured) if is_exact else []
        is_unmeasured = batch.old_logprobs is None and skipped == trained != set()
        if not is_exact and self.settings.logs_mismatch and is_unmeasured:
            groups = [min(skipped)]
        if not groups:
            return {}
        logprobs = map_rows(
            rows,
            self.models.policy.logprobs,
            self.topology,
            max_tokens=self.settings.update.max_tokens_per_micro_batch,
            packs=self.models.why_padded is None,
            groups=groups,
        )
        self.models.reshard()
        chosen = torch.arange(len(rows.mask)).view(-1, rows.rows_per_group)[groups].flatten()
        if is_exact and (text := first_difference(rows, chosen, logprobs[chosen])):
            raise ExactnessError(text)
        return logprob_gap(logprobs[chosen], rows.sampler_logprobs[chosen], rows.mask[chosen])

    def _mini_batches(self, batch: TrainBatch, step: int, skipped: Set[int]) -> Iterator[MiniBatch]:
        settings, rows, level = self.settings.update, batch.rows, self.spec.level
        size = rows.rows_per_group
        # A step on groups without a token to train on would move the weights by momentum.
        trained = _trained_groups(rows)
        for epoch in range(settings.num_epochs):
            generator = np.random.default_rng((self.settings.seed, step, epoch))
            order = generator.permutation(trained).tolist()
            for index in range(settings.num_mini_batches):
                groups = sorted(order[index :: settings.num_mini_batches])
                if not groups:
                    if self.demonstrations is not None:
                        # This optimizer step has texts.
                        yield MiniBatch([], [], 1, 1, 1, 0, is_first=False)
                    continue
                computed = [group for group in groups if group not in skipped]
                micro_batches: list[MicroBatch] = []
                num_computed = 0
                if computed:
                    micro_batches, num_computed = micro_batches_of(
                        rows,
                        computed,
                        self.topology,
                        max_tokens=settings.max_tokens_per_micro_batch,
                        packs=self.models.why_padded is None,
                        keep_groups_whole=level == "group",
                    )
                masks = rows.mask.view(-1, size, rows.mask.shape[1])
                rollouts = rows.trained_rollouts.view(-1, size)
                units = rollouts.any(dim=1) if level == "group" else rollouts
                denominator = int(units[groups].sum())
                if level == "token":
                    by_token = self._reduction == "token_mean"
                    counted = masks[groups].flatten(0, 1) if by_token else rollouts[groups].view(-1, 1)
                    denominator = count_denominator(counted, self._reduction, self.settings.max_tokens)
                # Metrics are means over the computed tokens and completions.
                num_tokens, num_units = (max(int(counted[computed].sum()), 1) for counted in (masks, units))
                counts = max(denominator, 1), num_tokens, num_units, num_computed
                yield MiniBatch(computed, micro_batches, *counts, is_first=epoch == index == 0)

    def _train_policy(
        self,
        batch: TrainBatch,
        mini_batch: MiniBatch,
        place: tuple[int, int],
        kl_coef: float,
        accumulator: MetricAccumulator,
    ) -> tuple[float, float]:
        """Make one optimizer step of the policy; return its divergence from the old policy, and the gradient norm.

        `place` is the step of the run, and the index of this optimizer step in the batch.
        """
        micro_batches = mini_batch.micro_batches
        accumulator.begin_step(mini_batch.num_tokens)
        tokens = sum(part.num_tokens for part in micro_batches if not part.is_filler)
        here = torch.tensor([tokens / self.topology.context_parallel], device=self.topology.device)
        accumulator.add("balance/rank_tokens_mean", here[0] / self.topology.num_data_shares)
        accumulator.add_largest("balance/rank_tokens_max", here, here > 0)
        accumulator.add("policy/loss", torch.zeros_like(here[0]))
        optimizer_step, (step, _) = self.models.policy_step, place
        share, num_targets, texts = self._texts(place)
        last = len(micro_batches) + len(texts) - 1
        now = None
        reads_others = batch.rows.owners is not None and self._reads_rollouts
        if reads_others and batch.old_logprobs is not None and micro_batches:
            # Compute all rows of the step, because the other rows of a rollout may be in other micro-batches.
            now = map_rows(
                batch.rows,
                self.models.policy.logprobs,
                self.topology,
                max_tokens=self.settings.update.max_tokens_per_micro_batch,
                packs=self.models.why_padded is None,
                groups=mini_batch.groups,
            )
            self.models.reshard()
        meter = BalanceMeter(self.models.policy.routers, self.topology.model_parallel)
        passes = [partial(self._compute, batch, micro_batch) for micro_batch in micro_batches]
        meter.count(passes, self.models.policy.model)
        for index, micro_batch in enumerate(micro_batches):
            loss = self._policy_loss(batch, micro_batch, mini_batch, kl_coef, accumulator, now)
            optimizer_step.backward((1 - share) * loss + meter.share(), is_last=index == last)
            accumulator.add("policy/loss", loss)
        self._learn_texts(share, num_targets, texts, accumulator)
        sums = accumulator.end_step()
        if (balance := meter.value()) is not None:
            accumulator.note("policy/router_aux_loss", balance)
        if self.settings.exact and mini_batch.is_first:
            # All ranks raise the error of the first rank that has one.
            for text in filter(None, gather(self.topology, accumulator.difference)):
                raise ExactnessError(text)
        for name in ("policy/loss", "sft/loss") if texts else ("policy/loss",):
            optimizer_step.require_finite(sums[name], step)
        finished = optimizer_step.finish(step)
        accumulator.note_all("policy", finished)
        return sums.get("policy/kl", 0.0), finished["grad_norm"]

    def _texts(self, place: tuple[int, int]) -> tuple[float, int, list[Batch]]:
        """Return the share of the texts of an optimizer step, all ranks' number of target tokens, and the texts."""
        if self.demonstrations is None:
            return 0.0, 0, []
        step, index_in_batch = place
        index = step * self.settings.update.steps_per_batch + index_in_batch
        texts, num_targets = self.demonstrations.micro_batches(index)
        return self.demonstrations.share(step), num_targets, texts

    def _learn_texts(
        self, share: float, num_targets: int, texts: Sequence[Batch], accumulator: MetricAccumulator
    ) -> None:
        """Make the backward passes of the texts, which are the last ones of an optimizer step."""
        for index, text in enumerate(texts, 1):
            assert self.demonstrations is not None
            loss = self.demonstrations.loss(text, num_targets)
            self.models.policy_step.backward(share * loss, is_last=index == len(texts))
            accumulator.add("sft/loss", loss)

    def _comparison(self, batch: TrainBatch, micro_batch: MicroBatch, beta: float) -> Comparison:
        """Return a function that compares the policy's distributions with the teacher's."""
        if batch.teacher_top is None:
            assert isinstance(self.models.teacher, Teacher)
            rows = batch.rows.for_teacher
            return self.models.teacher.comparison(micro_batch.of(rows).inputs_of(rows), beta)
        places = (batch.rows.mask.flatten().cumsum(0) - 1).view_as(batch.rows.input_ids)
        is_asked = micro_batch.inputs_of(batch.rows).is_asked
        chosen = places[micro_batch.rows, : micro_batch.length][is_asked]
        token_ids, logprobs = (to_device(x[chosen], micro_batch.device) for x in batch.teacher_top)
        return compared_with_top(token_ids, logprobs, beta)

    def _compute(self, batch: TrainBatch, micro_batch: MicroBatch) -> None:
        self.models.policy(micro_batch.inputs_of(batch.rows))

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
        if teacher is not None and teacher.kind == "full":
            compare = self._comparison(batch, micro_batch, teacher.beta)
        entropy_kind: EntropyKind = "gradient" if entropy_coef > 0 else "value"
        logprobs, entropy, outside, compared = self.models.policy(rows, entropy_kind, compare)
        inputs, rollouts = self._loss_inputs(batch, micro_batch, logprobs, now)
        losses = self.spec.loss(rollouts, self.settings.hparams)
        self._require_shape(losses, rollouts)
        # A row of a rollout has the gradient of its own tokens, and their share of the rollout's loss and metrics.
        lengths = shares = None
        if batch.rows.owners is not None:
            lengths = to_device(batch.rows.lengths[micro_batch.rows], micro_batch.device)
            shares = inputs.mask.sum(dim=1) / lengths.clamp(min=1)
            if self.spec.level == "completion":
                losses = losses + (shares - 1) * losses.detach()
            losses = losses[:, : inputs.mask.shape[1]] if self.spec.level == "token" else losses
        losses = self._weigh(losses, batch, micro_batch, inputs, accumulator)
        # The extra terms have one value per token, and are reduced as losses with one value per token are.
        if self.spec.level == "token":
            how, count = self._reduction, mini_batch.denominator
            loss = reduce_loss(losses, inputs.mask, how, count, lengths)
        else:
            how, count = "token_mean", mini_batch.num_tokens
            units = inputs.mask.any(dim=1).view(len(losses), -1).any(dim=1, keepdim=True)
            loss = reduce_loss(losses[:, None], units, "token_mean", mini_batch.denominator)
        terms: list[tuple[str, float, torch.Tensor]] = []
        if kl_coef > 0 and inputs.reference_logprobs is not None:
            penalty = kl_estimate(logprobs, inputs.reference_logprobs, kl.kl_kind, kl.kl_straight_through)
            if kl.kl_importance_weights:
                penalty = penalty * ratio(logprobs, inputs.old_logprobs)
            terms.append(("policy/kl_loss", kl_coef, penalty))
        if entropy_coef > 0:
            learns = None if batch.learns is None else micro_batch.cut(batch.learns)
            bonus = entropy if learns is None else torch.where(learns, entropy, 0.0)
            terms.append(("", -entropy_coef, bonus))
        if compared is not None:
            assert teacher is not None
            terms.append(("teacher/loss", teacher.coef, compared[..., 0]))
        for name, coef, values in terms:
            term = reduce_loss(values, inputs.mask, how, count, lengths)
            if name:
                accumulator.add(name, term)
            loss = loss + coef * term
        if compared is not None:
            accumulator.add_tokens("teacher/kl", compared[..., 1], inputs.mask)
        elif batch.teacher_logprobs is not None:
            reverse = kl_estimate(logprobs.detach(), micro_batch.cut(batch.teacher_logprobs), "k1")
            accumulator.add_tokens("teacher/kl", reverse, inputs.mask)
        hparams, num_units = self.settings.hparams, mini_batch.num_units
        add_policy_metrics(accumulator, self.spec, hparams, inputs, rollouts, shares, entropy, num_units)
        if not self.models.policy.support.is_whole:
            accumulator.add_tokens("sampler/outside_support", outside, inputs.mask)
        is_held = self.settings.exact and mini_batch.is_first
        if is_held and not micro_batch.is_filler and accumulator.difference is None:
            accumulator.difference = first_difference(batch.rows, micro_batch.rows, logprobs.detach())
        if self.settings.logs_mismatch and (batch.old_logprobs is None or is_held):
            # This is the trainer's only forward pass with the weights that sampled these tokens.
            gap = (logprobs.detach() - micro_batch.cut(batch.rows.sampler_logprobs)).abs()
            accumulator.add_tokens("sampler/logprob_gap_mean", gap, inputs.mask)
            accumulator.add_largest("sampler/logprob_gap_max", gap, inputs.mask)
        return loss

    def _require_shape(self, losses: torch.Tensor, inputs: LossInputs) -> None:
        """Raise unless there is one loss per token, completion or group of `inputs`."""
        wanted = {
            "token": (*inputs.mask.shape,),
            "completion": (len(inputs.mask),),
            "group": (len(inputs.mask) // inputs.rows_per_group,),
        }[self.spec.level]
        if losses.shape != wanted:
            # Broadcasting would give a wrong average, which depends on the micro-batches.
            raise ConfigError(
                f"the loss of the algorithm {self.spec.name!r} has the shape {tuple(losses.shape)}: with "
                f"level={self.spec.level!r} the shape must be {wanted}, one value per {self.spec.level}. Return "
                "losses of that shape, or change level."
            )

    def _loss_inputs(
        self, batch: TrainBatch, micro_batch: MicroBatch, logprobs: torch.Tensor, now: torch.Tensor | None
    ) -> tuple[LossInputs, LossInputs]:
        """Return the inputs of the loss of these rows; and the same inputs plus the tokens of a rollout's other rows.

        Only losses that read whole rollouts need these tokens, which are constants. `now` has their log-probabilities.
        It is None in the only optimizer step of a batch: the ratio is then 1, which any two equal numbers give.
        """

        def cut(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else micro_batch.cut(x)

        owners, old, mask = batch.rows.owners, cut(batch.old_logprobs), micro_batch.mask_of(batch.rows)
        log_weights = None
        if self.spec.reads_weights and batch.rows.weights is not None:
            to_row = masked_mean if self.settings.correction.weighs_rows else masked_sum
            if owners is None:
                log_weights = to_row(micro_batch.cut(batch.rows.weights).log(), mask)
            else:
                by_row = to_row(batch.rows.weights.log(), batch.rows.mask)
                by_rollout = torch.zeros_like(by_row).index_add(0, owners, by_row)[owners]
                log_weights = to_device(by_rollout[micro_batch.rows], micro_batch.device)
        inputs = LossInputs(
            policy_logprobs=logprobs,
            old_logprobs=logprobs.detach() if old is None else old,
            reference_logprobs=cut(batch.reference_logprobs),
            advantages=micro_batch.cut(batch.advantages),
            rewards=to_device(batch.rows.rewards.view(-1)[micro_batch.rows], micro_batch.device),
            mask=mask,
            rows_per_group=batch.rows.rows_per_group,
            marked=cut(batch.marked),
            log_weights=log_weights,
        )
        if owners is None or not self._reads_rollouts:
            return inputs, inputs
        others, trained = [], batch.rows.mask
        for row in micro_batch.rows.tolist():
            rows = torch.nonzero((owners == owners[row]) & (torch.arange(len(owners)) != row))[:, 0]
            index, place = torch.nonzero(trained[rows], as_tuple=True)
            others.append(rows[index] * trained.shape[1] + place)
        places = pad_sequence(others, batch_first=True, padding_value=-1)

        def joined(own: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor:
            assert whole is not None
            return torch.cat(
                [own, to_device(whole.flatten()[places.clamp(min=0)], own.device).to(own.dtype)], dim=1
            )

        sampler, reference, marked = batch.rows.sampler_logprobs, inputs.reference_logprobs, inputs.marked
        old = sampler if batch.old_logprobs is None else batch.old_logprobs
        return inputs, replace(
            inputs,
            policy_logprobs=joined(logprobs, sampler if now is None else now),
            old_logprobs=joined(inputs.old_logprobs, old),
            reference_logprobs=None if reference is None else joined(reference, batch.reference_logprobs),
            advantages=joined(inputs.advantages, batch.advantages),
            mask=torch.cat([mask, to_device(places >= 0, mask.device)], dim=1),
            marked=None if marked is None else joined(marked, batch.marked),
        )

    def _weigh(
        self,
        losses: torch.Tensor,
        batch: TrainBatch,
        micro_batch: MicroBatch,
        inputs: LossInputs,
        accumulator: MetricAccumulator,
    ) -> torch.Tensor:
        """Multiply losses by the weights of the correction, and set masked losses to 0; denominators do not change."""
        by_token, mask = self.spec.level == "token", inputs.mask
        sampler = micro_batch.cut(batch.rows.sampler_logprobs)
        if self.settings.correction.bypass:
            correction = self.settings.correction
            weights = weights_in_update(correction, inputs.policy_logprobs, sampler, mask)
        else:
            weights = None if batch.rows.weights is None else micro_batch.cut(batch.rows.weights)
        if weights is not None and not self.spec.reads_weights:
            # The weights of a row are equal inside the mask; outside, for example in prompts, they are arbitrary.
            losses = losses * (weights if by_token else torch.where(mask, weights, 0.0).amax(dim=1))
        if batch.learns is not None:
            losses = torch.where(micro_batch.cut(batch.learns), losses, 0.0)
        if (bound := self.settings.update.off_policy_mask) is None:
            return losses
        gaps = sampler - inputs.policy_logprobs.detach()
        divergence = masked_mean(gaps.nan_to_num(nan=0.0), mask)[:, None]
        is_far = (divergence > bound) & (masked_mean(inputs.advantages, mask)[:, None] < 0)
        accumulator.add_tokens("policy/off_policy_masked", is_far.float().expand_as(mask), mask)
        return torch.where(is_far if by_token else is_far[:, 0], 0.0, losses)

    def _train_critic(
        self, batch: TrainBatch, mini_batch: MiniBatch, step: int, accumulator: MetricAccumulator
    ) -> None:
        """Make one optimizer step of the critic."""
        critic, optimizer_step = self.models.critic, self.models.critic_step
        values, returns = batch.rows.values, batch.returns
        assert critic is not None
        assert optimizer_step is not None
        assert values is not None
        assert returns is not None
        value_clip = self.settings.critic.value_clip
        accumulator.begin_step(mini_batch.num_tokens)
        for index, micro_batch in enumerate(mini_batch.micro_batches):
            mask = micro_batch.mask_of(batch.rows)
            new, old = critic(micro_batch.inputs_of(batch.rows)), micro_batch.cut(values)
            losses = value_loss(new, old, micro_batch.cut(returns), value_clip)
            loss = reduce_loss(losses, mask, "token_mean", mini_batch.num_tokens)
            optimizer_step.backward(loss, is_last=index == len(mini_batch.micro_batches) - 1)
            accumulator.add("critic/loss", loss)
            if value_clip is not None:
                far = (new.detach() - old).abs() > value_clip
                accumulator.add_tokens("critic/clip_fraction", far.float(), mask)
        sums = accumulator.end_step()
        optimizer_step.require_finite(sums["critic/loss"], step)
        accumulator.note_all("critic", optimizer_step.finish(step))


def _trained_groups(rows: RolloutBatch) -> list[int]:
    """Return the groups that have a token to train on."""
    return [*torch.nonzero(rows.mask.any(dim=1).view(-1, rows.rows_per_group).any(dim=1))[:, 0].tolist()]
