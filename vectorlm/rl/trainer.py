"""Reinforcement learning: the loop that every rank runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vectorlm.checkpoint.state import Part
from vectorlm.rl.metrics import batch_metrics, rollout_metrics
from vectorlm.telemetry.timers import Timer

if TYPE_CHECKING:
    from vectorlm.algorithms import AdaptiveKL
    from vectorlm.algorithms.spec import AlgorithmSpec
    from vectorlm.checkpoint.state import CheckpointStore
    from vectorlm.exam import Exam
    from vectorlm.handover import DeviceTurn
    from vectorlm.model.schedule import Schedule
    from vectorlm.rl.diary import Diary
    from vectorlm.rl.gather import Gatherer
    from vectorlm.rl.roles import Critic, Policy, Reference
    from vectorlm.rl.score import Assessor
    from vectorlm.rl.update import Updater
    from vectorlm.telemetry.metrics import MetricSink


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
    gatherer: Gatherer
    assessor: Assessor
    updater: Updater
    turn: DeviceTurn
    """Hands the devices over, and with them the policy's weights to the engine."""
    sink: MetricSink
    """Takes the metrics of every step."""
    diary: Diary
    """Keeps the rollouts themselves."""
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
    step: int = 0
    """Batches of rollouts that were trained on."""
    tokens_seen: int = 0
    """Tokens of the prompts and completions that were sampled."""

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
            with self.turn.sampling(self.step) as report:
                gathered = self.gatherer.gather(self.step, timer)
            metrics = rollout_metrics(gathered, self.step) | {"time/publish_s": report.total_s}
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
        return metrics | self.speed(timer.drain(), metrics)

    def follow(self, metrics: dict[str, float]) -> None:
        """Let the KL controller and the reference follow the policy."""
        if self.reference is not None:
            metrics["reference/kl_coef"] = self.kl_weight
        if self.kl_controller is not None and "reference/kl" in metrics:
            # The controller's divergence is that of whole completions.
            divergence = metrics["reference/kl"] * metrics["completion/length_mean"]
            self.kl_controller.update(divergence, int(metrics["rollout/groups"]) * self.gatherer.group_size)
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
        return self.exam.hold(self.policy.model, self.step) if self.exam and is_due else {}

    def speed(self, times: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        """Return the times of a step, and what was done in them."""
        if "completion/length_mean" in metrics:
            num_rollouts = metrics["rollout/sampled_groups"] * self.gatherer.group_size
            generated = metrics["completion/length_mean"] * num_rollouts
            read = metrics["prompt/length_mean"] * num_rollouts
            self.tokens_seen += int(generated + read)
            times["perf/tokens_seen"] = float(self.tokens_seen)
            times["perf/tokens_per_s"] = (generated + read) / times["time/step_s"]
            times["perf/generated_tokens_per_s"] = generated / times["time/generate_s"]
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
            "position": self.gatherer.order.position,
            "replay_position": 0 if self.gatherer.replay is None else self.gatherer.replay.position,
            "tokens_seen": self.tokens_seen,
            "kl": None if self.kl_controller is None else self.kl_controller.state_dict(),
        }

    def resume(self, step: int) -> None:
        """Put everything back to where the checkpoint of `step` found it."""
        assert self.store is not None
        state = self.store.load(step, self.parts())
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
        self.gatherer.order.position = state["position"]
        if self.gatherer.replay is not None:
            self.gatherer.replay.position = state["replay_position"]
        self.tokens_seen = state["tokens_seen"]
        if self.kl_controller is not None:
            self.kl_controller.load_state_dict(state["kl"])
        self.step = step
