"""Reinforcement learning: the loop that every rank runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from vectorlm.checkpoint.state import Part
from vectorlm.rl.metrics import batch_metrics, rollout_metrics
from vectorlm.telemetry.timers import Span, Timer

if TYPE_CHECKING:
    from vectorlm.algorithms import AdaptiveKL
    from vectorlm.algorithms.spec import AlgorithmSpec
    from vectorlm.checkpoint.state import CheckpointStore
    from vectorlm.exam import Exam
    from vectorlm.handover import DeviceTurn
    from vectorlm.model.schedule import Schedule
    from vectorlm.rl.diary import Diary
    from vectorlm.rl.gather import Source
    from vectorlm.rl.roles import Critic, Policy, Reference
    from vectorlm.rl.score import Assessor
    from vectorlm.rl.update import Updater
    from vectorlm.telemetry.metrics import MetricSink
    from vectorlm.telemetry.timeline import Timeline


@dataclass(kw_only=True)
class RLTrainer:
    """Collect, score, work out advantages, update, publish, log; no line of it knows an algorithm's name."""

    spec: AlgorithmSpec
    policy: Policy
    policy_optimizer: torch.optim.Optimizer
    reference: Reference | None
    critic: Critic | None
    critic_optimizer: torch.optim.Optimizer | None
    schedules: Sequence[Schedule]
    """Of both optimizers."""
    source: Source
    assessor: Assessor
    updater: Updater
    turn: DeviceTurn
    """Hands the devices over, and with them the policy's weights to the engine."""
    sink: MetricSink
    """Takes the metrics of every step."""
    diary: Diary
    """Keeps the rollouts themselves."""
    timeline: Timeline
    """Keeps who did what when."""
    max_steps: int
    """Batches of rollouts in the whole run."""
    kl_coef: float = 0.0
    """Weight of the KL penalty, where no controller moves it."""
    kl_controller: AdaptiveKL | None = None
    """Moves that weight."""
    reference_sync_every: int | None = None
    """Steps between two moments at which the reference becomes the policy; None leaves it where it began."""
    critic_warmup_steps: int = 0
    """Steps at the start that train the critic alone."""
    drops_truncated: bool = False
    """Whether completions that were cut off have no part in the loss."""
    pad_token_id: int = 0
    """Fills rows up."""
    exam: Exam | None = None
    """Asks the engine the held-out questions, before training and at its end too."""
    exam_every: int = 1
    """Steps between exams."""
    store: CheckpointStore | None = None
    """Keeps checkpoints."""
    save_every: int = 1
    """Steps between checkpoints."""
    peak_flops: float | None = None
    """Operations per second of which all devices together are capable, where that is known."""
    step: int = 0
    """Batches of rollouts that were trained on."""
    swapped_at: float | None = None
    """When the engine got the weights of this step, in seconds of ``time.perf_counter``."""
    tokens_seen: int = 0
    """Tokens of the prompts and completions that were sampled."""
    exams: list[Span] = field(default_factory=list)
    """When the policy was examined since the last step."""

    def run(self, resume_step: int | None = None) -> None:
        """Train to the end, from the start or from the checkpoint of `resume_step`; called on all ranks.

        Raises:
            NonFiniteLoss: Training diverged; the step changed no weights.
            RewardError: A reward function failed, and that is to stop the run.
        """
        if resume_step is None:
            self.sink.write(0, self.look())
        else:
            self.resume(resume_step)
        while self.step < self.max_steps:
            metrics = self.train()
            self.step += 1
            self.follow(metrics)
            self.sink.write(self.step, metrics | self.look())
            if self.store and self.step % self.save_every == 0:
                self.store.save(self.step, self.parts(), self.state())

    def train(self) -> dict[str, float]:
        """Make one step: a batch of rollouts, and the optimizer steps on it."""
        timer = Timer()
        with timer.span("time/step_s"):
            began = time.perf_counter()
            with self.turn.sampling(self.step) as report:
                timer.spans.append(("time/publish_s", began, time.perf_counter()))
                busy, self.turn.busy = self.turn.busy, []
                metrics = self.engine_idle(busy)
                gathered = self.source.gather(self.step, timer)
            metrics |= rollout_metrics(gathered, self.step) | self.source.metrics(self.step)
            metrics |= {"time/publish_s": report.total_s, "time/stall_s": report.stall_s}
            rows = gathered.chosen(self.spec, self.pad_token_id, self.drops_truncated)
            batch = None
            if rows is not None:
                with timer.span("time/assess_s"):
                    batch = self.assessor.assess(rows, gathered.greedy_rewards, self.kl_weight)
            # Before the update, which may end the run: what it failed on is to be found there.
            self.diary.write(self.step + 1, gathered, batch)
            if batch is not None:
                metrics |= batch.metrics
                # Of a batch that was rejected whole nothing is left to learn.
                if batch.rows.mask.any():
                    with timer.span("time/update_s"):
                        metrics |= batch_metrics(batch) | self.updater.update(
                            batch,
                            self.step,
                            kl_coef=self.kl_weight if self.assessor.kl_in == "loss" else 0.0,
                            trains_policy=self.step >= self.critic_warmup_steps,
                        )
        self.timeline.write(self.step + 1, [*self.exams, *timer.spans], busy)
        self.exams.clear()
        return metrics | self.speed(timer.drain(), metrics)

    def follow(self, metrics: dict[str, float]) -> None:
        """Let the KL controller and the reference follow the policy."""
        if self.reference is not None:
            metrics["reference/kl_coef"] = self.kl_weight
        if self.kl_controller is not None and "reference/kl" in metrics:
            # The controller's divergence is that of whole completions.
            divergence = metrics["reference/kl"] * metrics["completion/length_mean"]
            self.kl_controller.update(divergence, int(metrics["rollout/groups"]) * self.source.group_size)
        every = self.reference_sync_every
        if self.reference is not None and every and self.step % every == 0:
            self.reference.follow()

    @property
    def kl_weight(self) -> float:
        """The weight of the KL penalty now."""
        return self.kl_coef if self.kl_controller is None else self.kl_controller.value

    def look(self) -> dict[str, float]:
        """Examine the policy where that is due at this step."""
        is_due = self.step % self.exam_every == 0 or self.step == self.max_steps
        if self.exam is None or not is_due:
            return {}
        began = time.perf_counter()
        metrics = self.exam.hold(self.policy.model, self.step)
        self.exams.append(("time/exam_s", began, time.perf_counter()))
        return metrics

    @cached_property
    def num_weights(self) -> int:
        """Weights of policy and critic that take part in the matrix products of every token."""
        policy: Any = self.policy.model
        total = _num_multiplied(policy, bool(policy.config.tie_word_embeddings))
        return (
            total if self.critic is None else total + _num_multiplied(self.critic.model, has_tied_head=False)
        )

    def engine_idle(self, busy: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Return the share of the time between two swaps in which the engine computed nothing, where it is known."""
        before, self.swapped_at = self.swapped_at, self.turn.swapped_at
        if not busy or before is None or self.swapped_at is None or self.swapped_at == before:
            return {}
        busy_s = sum(end - max(start, before) for start, end in busy if end > before)
        return {"perf/engine_idle": 1 - busy_s / (self.swapped_at - before)}

    def speed(self, times: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        """Return the times of a step, and what was done in them."""
        if "completion/length_mean" in metrics:
            num_rollouts = metrics["rollout/sampled_groups"] * self.source.group_size
            generated = metrics["completion/length_mean"] * num_rollouts
            read = metrics["prompt/length_mean"] * num_rollouts
            self.tokens_seen += int(generated + read)
            times["perf/tokens_seen"] = float(self.tokens_seen)
            times["perf/tokens_per_s"] = (generated + read) / times["time/step_s"]
            times["perf/generated_tokens_per_s"] = generated / times["time/generate_s"]
        times["perf/trainer_idle"] = times["time/generate_s"] / times["time/step_s"]
        times["perf/stall"] = metrics["time/stall_s"] / times["time/step_s"]
        if "perf/trained_tokens" in metrics:
            work = 6 * self.num_weights * metrics["perf/trained_tokens"]
            times["perf/model_flops_per_s"] = work / times["time/update_s"]
            if self.peak_flops is not None:
                times["perf/mfu"] = times["perf/model_flops_per_s"] / self.peak_flops
        if torch.cuda.is_available():
            times["perf/device_memory_max_bytes"] = float(torch.cuda.max_memory_allocated())
        return times

    def parts(self) -> dict[str, Part]:
        """Return what a checkpoint holds of models and optimizers."""
        parts = {"policy": Part(self.policy.model, self.policy_optimizer)}
        if self.critic is not None:
            parts["critic"] = Part(self.critic.model, self.critic_optimizer)
        if self.reference is not None and self.reference.model is not None and self.reference_sync_every:
            parts["reference"] = Part(self.reference.model, None)
        return parts

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides."""
        return {
            "schedules": [schedule.state_dict() for schedule in self.schedules],
            "rollouts": self.source.state(),
            "tokens_seen": self.tokens_seen,
            "kl": None if self.kl_controller is None else self.kl_controller.state_dict(),
        }

    def resume(self, step: int) -> None:
        """Put everything back to where the checkpoint of `step` found it."""
        assert self.store is not None
        state = self.store.load(step, self.parts())
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
        self.source.load_state(state["rollouts"])
        self.tokens_seen = state["tokens_seen"]
        if self.kl_controller is not None:
            self.kl_controller.load_state_dict(state["kl"])
        self.step = step


def _num_multiplied(model: Any, has_tied_head: bool) -> int:
    """Count the weights that a token is multiplied with: of a table of embeddings alone it reads one row."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return total if has_tied_head else total - model.get_input_embeddings().weight.numel()
