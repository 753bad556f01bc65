"""The training loop of reinforcement learning, which every rank runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from vectorlm.algorithms.kl import AdaptiveKL
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.errors import ConfigError, RewardError
from vectorlm.ranks.topology import Topology
from vectorlm.report.step_lines import Timeline
from vectorlm.rl.adapters import OtherAdapters
from vectorlm.rl.metrics import SpeedMeter, accepted_tokens, batch_metrics, rollout_metrics
from vectorlm.rl.models import RLModels
from vectorlm.rl.prepare import prepare_batch
from vectorlm.rl.prompts import Demonstrations
from vectorlm.rl.rollout import RolloutGroup, TrainBatch, make_batch
from vectorlm.rl.rollouts.logger import RolloutLogger
from vectorlm.rl.settings import StepSettings
from vectorlm.rl.update import Updater
from vectorlm.train.handover import DeviceTurn
from vectorlm.train.recorder import Recorder, Timer
from vectorlm.types import PromptRecord, TrainedModel

UNSCORED_STEPS = 3
"""A run ends after this many steps without any reward."""


class Source(Protocol):
    """The rollouts of each step; every call is collective."""

    @property
    def group_size(self) -> int:
        """Return G."""

    def collect(self, step: int, timer: Timer) -> list[RolloutGroup]:
        """Return the scored rollouts of `step`; the engine holds the weights of that step."""

    def metrics(self, step: int) -> dict[str, float]:
        """Return metrics of the requests in flight while the ranks train on the rollouts of `step`."""

    def oldest_version(self, step: int) -> int | None:
        """Return the first version whose tokens `step` trains on; None: all versions."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Resume from a `state` at `step`."""


class RLLoop:
    """Publish, collect, score, prepare, update, log; the loop never reads an algorithm's name."""

    def __init__(
        self,
        models: RLModels,
        spec: AlgorithmSpec,
        source: Source,
        settings: StepSettings,
        turn: DeviceTurn,
        recorder: Recorder,
        *,
        rollout_log: RolloutLogger,
        timeline: Timeline,
        topology: Topology,
        demonstrations: Demonstrations | None = None,
        overlaps_sampling: bool = False,
        teacher_prompt: Callable[[PromptRecord], Sequence[int]] | None = None,
        adapters: OtherAdapters | None = None,
    ) -> None:
        """Build the loop; `turn` hands the devices to the engine and back.

        With `overlaps_sampling`, the ranks train while the engine samples rollouts and answers held-out prompts.
        `teacher_prompt` returns the token ids of the prompt that a teacher reads in place of the policy's. `adapters`
        sends the engine the other adapters of a LoRA run, which rewards and environments may ask.
        """
        self._adapters = adapters
        if adapters is not None:
            turn.before_update = adapters.send
        self.overlaps_sampling, self._teacher_prompt = overlaps_sampling, teacher_prompt
        self.models, self.spec, self.source, self.settings = models, spec, source, settings
        self.turn, self.recorder, self.topology = turn, recorder, topology
        self.rollout_log, self.timeline = rollout_log, timeline
        self.updater = Updater(models, spec, settings, topology, demonstrations)
        self.meter = SpeedMeter(models, settings.peak_flops, overlaps_sampling=overlaps_sampling)
        kl = settings.kl
        self.kl_controller = (
            None if kl.kl_target is None else AdaptiveKL(kl.kl_coef, kl.kl_target, kl.kl_horizon)
        )
        self.step = 0
        self._num_scored = 0
        """Steps with a reward, or that trained without one, in this run and before it resumed."""
        self._num_unscored = 0
        """Steps before the first scored one in which no call of a reward function failed."""
        self._unscored: dict[str, int] = {}
        """Number of completions for which a reward function returned None, by its name; 0 once it returned a number."""
        self._busy: list[tuple[float, float]] = []

    def run(self) -> None:
        """Train to the end, from the start or from the recorder's checkpoint; called on all ranks.

        Raises:
            NonFiniteLoss: Training diverged; the step changed no weights.
            RewardError: A reward function failed and `rl.on_reward_error` is ``stop``; or the functions returned None
                for every completion of the first `UNSCORED_STEPS` steps.
        """
        saved = self.recorder.resume(self._models(self.recorder.resume_step or 0))
        if saved is None:
            self.recorder.write(0, self._evaluate())
        else:
            self._load_state(saved)
        while self.step < self.recorder.num_steps and not self.recorder.stopping.is_over:
            metrics, batch = self._train()
            self.step += 1
            self.updater.follow_run(self.step)
            metrics |= self._follow(metrics, batch)
            self.recorder.flush()  # The weights that an evaluation in flight reads are about to be replaced.
            pending = self.recorder.begin_evaluation(self.step) if self.overlaps_sampling else None
            metrics |= self._evaluate() if pending is None else {}
            is_stopped = self.recorder.end_step(self.step, metrics)
            if is_stopped and pending is None and "sampler/generate_s" not in metrics:
                metrics |= self._evaluate()
            # After the last step the engine's times arrive with the hot swap of the evaluation.
            is_last = self.step == self.recorder.num_steps or self.recorder.stopping.is_over
            busy = self._busy + self.turn.busy if is_last else self._busy
            self.timeline.write(self.step, self.recorder.timer.spans, busy)
            self.recorder.write(self.step, metrics, pending)
            if self.is_unscored and self._num_unscored == UNSCORED_STEPS:
                raise RewardError(
                    f"no completion in {UNSCORED_STEPS} steps had a reward. {self.why_unscored}"
                )
            if self.step == UNSCORED_STEPS and any(self._unscored.values()):
                self.recorder.say(f"warning: {self.why_unscored}")
            if self.recorder.is_save_due(self.step):
                self.recorder.save_if_due(self.step, self._models(self.step), self._state)
        self.recorder.flush()

    def _models(self, step: int) -> dict[str, TrainedModel]:
        """Return the models for a checkpoint after `step`."""
        models = self.models.trained(with_reference=self.settings.kl.reference_sync_every is not None)
        return models | ({} if self._adapters is None else self._adapters.trained(step))

    def _refuse_images(self, groups: Sequence[RolloutGroup]) -> None:
        """Raise ConfigError if an environment has returned an image that a model of the run would not see."""
        path = self.settings.reads_text_alone
        if path and any(rollout.pictures for group in groups for rollout in group.rollouts):
            raise ConfigError(f"{path} cannot be used with images, and the environment returned one.")

    def _train(self) -> tuple[dict[str, float], TrainBatch | None]:
        """Collect a batch of rollouts, make the optimizer steps on it, and return metrics and the batch."""
        timer, batch = self.recorder.timer, None
        with timer.span("time/step_s"):
            began = time.perf_counter()
            with self.turn.sampling(self.step) as report:
                timer.spans.append(("time/publish_s", began, time.perf_counter()))
                self._busy, self.turn.busy = self.turn.busy, []
                metrics = self.meter.engine_idle(self._busy, self.turn.swapped_at)
                groups = self.source.collect(self.step, timer)
                metrics |= accepted_tokens(self.turn.engine)
            self._refuse_images(groups)
            oldest = self.source.oldest_version(self.step)
            metrics |= rollout_metrics(groups, self.step, oldest) | self.source.metrics(self.step)
            metrics |= {"time/publish_s": report.total_s, "time/stall_s": report.stall_s}
            rows = make_batch(
                groups,
                self.spec,
                pad_token_id=self.settings.pad_token_id,
                drop_truncated=self.settings.update.drop_truncated,
                oldest_version=oldest,
                image_tokens=self.models.policy.image_tokens,
                teacher_prompt=self._teacher_prompt,
            )
            routers = self.models.policy.routers
            if routers is not None:
                routers.begin_batch()
            if rows is not None:
                with timer.span("time/assess_s"):
                    batch = prepare_batch(
                        rows, self.models, self.spec, self.settings, self.topology, kl_coef=self.kl_coef
                    )
                metrics |= batch.metrics
            # Logged before the update, which may end the run: the log then has the rollouts that it failed on.
            self.rollout_log.write(self.step + 1, groups, batch)
            self.recorder.callbacks.call("on_rollouts", self.step + 1, self.rollout_log.records)
            is_warm = self.models.critic is None or self.step >= self.settings.critic.warmup_steps
            # The correction may have rejected every token.
            if batch is not None and batch.rows.mask.any():
                kl_coef = self.kl_coef if self.settings.kl.kl_in == "loss" else 0.0
                with timer.span("time/update_s"):
                    metrics |= batch_metrics(batch)
                    metrics |= self.updater.update(batch, self.step, kl_coef=kl_coef, trains_policy=is_warm)
                if metrics.get("policy/grad_norm") == 0:
                    is_constant = metrics.get("reward/constant_groups") == 1
                    why = ", because all groups have equal rewards" if is_constant else ""
                    self.recorder.say(
                        f"step {self.step + 1}: the policy did not change: its gradient is 0{why}"
                    )
            elif is_warm and self.updater.demonstrations is not None:
                with timer.span("time/update_s"):
                    metrics |= self.updater.update_on_texts(self.step)
            if routers is not None and (share := routers.differing_share()) is not None:
                metrics["policy/routes_differ"] = share
        self._count_scores(groups, metrics)
        return metrics | self.meter.speeds(timer.seconds, metrics, groups), batch

    @property
    def is_unscored(self) -> bool:
        """Whether no completion of any step had a reward, and nothing was learned without rewards."""
        return self.step > 0 and self._num_scored == 0

    @property
    def why_unscored(self) -> str:
        """Why the run `is_unscored`, and what to do."""
        if not any(self._unscored.values()):
            return "Fix the reward functions: their calls failed (see reward/errors)."
        found = ", ".join(
            f"{name!r} returned None for all {count} completions"
            for name, count in self._unscored.items()
            if count
        )
        return f"The reward {found}. Check that it ends with `return`."

    def _count_scores(self, groups: Sequence[RolloutGroup], metrics: Mapping[str, float]) -> None:
        if "reward/mean" in metrics or "policy/loss" in metrics:
            self._num_scored += 1
        # A call that failed and was skipped did not return None.
        if not groups or metrics["reward/errors"]:
            return
        self._num_unscored += self._num_scored == 0
        for group in groups:
            for name, values in group.rewards_by_name.items():
                before = self._unscored.get(name)
                has_scored = before == 0 or not values.isnan().all()
                self._unscored[name] = 0 if has_scored else (before or 0) + len(values)

    @property
    def kl_coef(self) -> float:
        """The weight of the KL penalty at this step."""
        return self.settings.kl.kl_coef if self.kl_controller is None else self.kl_controller.value

    def _follow(self, metrics: Mapping[str, float], batch: TrainBatch | None) -> dict[str, float]:
        """Adapt the weight of the KL penalty, sync the reference, and return the weight used in this step."""
        if self.models.reference is None:
            return {}
        found = {"reference/kl_coef": self.kl_coef}
        if self.kl_controller is not None and "reference/kl" in metrics and batch is not None:
            # The target is per completion, and the metric is a mean over the tokens that are trained on.
            lengths = batch.rows.lengths[batch.rows.trained_rollouts]
            divergence = metrics["reference/kl"] * lengths.float().mean().item()
            self.kl_controller.update(divergence, int(metrics["rollout/groups"]) * self.source.group_size)
        every = self.settings.kl.reference_sync_every
        if every is not None and self.step % every == 0:
            self.models.reference.sync()
        return found

    def _evaluate(self) -> dict[str, float]:
        metrics = self.recorder.evaluate_if_due(self.step)
        if metrics:
            self.recorder.require_logged(self.step, metrics)
            self.recorder.callbacks.call("on_evaluation", self.step, metrics)
        return metrics | self.recorder.stopping.observe(self.step, metrics)

    def _state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, besides models and optimizers."""
        return {
            "schedules": [schedule.state_dict() for schedule in self.models.schedules],
            "rollouts": self.source.state(),
            "tokens_seen": self.meter.tokens_seen,
            "num_scored": self._num_scored,
            "unscored": (self._num_unscored, dict(self._unscored)),
            "kl": None if self.kl_controller is None else self.kl_controller.state_dict(),
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        for schedule, saved in zip(self.models.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
        self.step = self.recorder.resume_step or 0
        self.source.load_state(state["rollouts"], self.step)
        self.meter.tokens_seen = state["tokens_seen"]
        # None if the checkpoint was written without rl.kl_target.
        if self.kl_controller is not None and state["kl"] is not None:
            self.kl_controller.load_state_dict(state["kl"])
        # Checkpoints of earlier versions do not have it; most of their steps had rewards.
        self._num_scored = state.get("num_scored", self.step)
        self._num_unscored, counts = state.get("unscored", (0, {}))
        self._unscored = dict(counts)
