"""Write metrics, checkpoints and evaluations at their intervals, and time the phases of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch.profiler import record_function

from vectorlm.errors import ConfigError
from vectorlm.sampling.settings import EXPERTS
from vectorlm.settings import nearest
from vectorlm.train.callbacks import Callbacks
from vectorlm.train.checkpoint.hub import HubUploads
from vectorlm.train.checkpoint.state import CheckpointStore
from vectorlm.train.load import NF4Linear
from vectorlm.types import Evaluation, MetricSink, TrainedModel

FALLING = (
    *("loss", "perplexity", "bits_per_byte"),
    *("step_brier", "/kl", "rejected_reward", "wrong_probability"),
)
"""Endings of metrics that are best when lowest, unless a setting or the harness sets the direction."""
OWN = ("eval/accuracy", "eval/reward/")
"""Beginnings of reward metrics, which are always best when highest."""

CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")
"""Names of the number of experts that a layer chooses for a token, by model family."""


@dataclass
class EarlyStopping:
    """Follows one metric over a run, from the first evaluation after step 0. All ranks call the methods alike."""

    metric: str = "eval/loss"
    """Name of the metric. `mode` or the harness (`falling`) sets its direction, or else `FALLING` and `OWN`."""
    patience: int | None = None
    """Stop after this many evaluations in a row without improvement; None never stops."""
    min_delta: float = 0.0
    """Smallest change that counts as an improvement."""
    is_named: bool = False
    """Whether the config sets the metric."""
    keeps_best: bool = False
    """Whether the best evaluation gets a checkpoint."""
    mode: Literal["max", "min"] | None = None
    """Whether the highest or the lowest value is the best; None follows the harness, or else the metric's name."""
    falling: dict[str, bool] = field(default_factory=dict)
    """Whether the lowest value is the best, by metric of the harness. Evaluations fill it."""
    say: Callable[[str], None] = print
    is_asked: bool = False
    """Whether a callback has stopped the run."""

    def __post_init__(self) -> None:
        self._best: tuple[float, int | None] = (math.inf, None)
        # The next evaluation, times `_sign`, must be lower than this by min_delta.
        self._to_beat: tuple[float, int | None] = (math.inf, None)
        self._num_without = 0
        self._was_logged = False

    @property
    def _sign(self) -> float:
        by_name = self.metric.endswith(FALLING) and not self.metric.startswith(OWN)
        is_falling = self.mode == "min" if self.mode else self.falling.get(self.metric, by_name)
        return 1.0 if is_falling else -1.0

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint; None if the best is not kept."""
        return self._best[1]

    @property
    def is_over(self) -> bool:
        """Whether `patience` is exhausted, or a callback stopped the run."""
        return self.is_asked or (self.patience is not None and self._num_without >= self.patience)

    def require_logged(self, metrics: Mapping[str, float]) -> None:
        """Raise `ConfigError` if the config sets a metric that is not in `metrics`, the evaluations of a step."""
        if self.is_named and not self._was_logged and self.metric not in metrics:
            known = sorted(name for name in metrics if name.startswith("eval/"))
            text = f"must be one of {', '.join(known) or 'none'}. {nearest(self.metric, known)}"
            raise ConfigError(f"train_parameters.best_metric={self.metric!r} {text}".rstrip())

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Follow the metric in an evaluation after `step`; return more metrics."""
        self._was_logged |= self.metric in metrics
        if step == 0 or self.metric not in metrics:
            return {}
        # Ranks may differ in times, and in the statistics of tasks that draw random numbers.
        of_main = [metrics[self.metric]]
        if dist.is_initialized():
            dist.broadcast_object_list(of_main)
        value = self._sign * of_main[0]
        if self.keeps_best and value < self._best[0]:
            self._best = (value, step)
        if self.patience is None:
            return {}
        if value < self._to_beat[0] - self.min_delta:
            self._to_beat = (value, step)
            self._num_without = 0
        else:
            self._num_without += 1
        if self.is_over and not self.is_asked:
            best, at = self._to_beat
            by = f" by more than {self.min_delta:g}" if self.min_delta else ""
            to_beat = "" if at is None else f" (to beat: {self._sign * best:.4f} of step {at})"
            text = f"has not improved{by} in {self._num_without} evaluations{to_beat}"
            self.say(f"stopped early at step {step}: {self.metric} {text}")
        return {"eval/stopped_early": float(self.is_over)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        state = {"metric": self.metric, "sign": self._sign, "falling": dict(self.falling)}
        state |= {"best": self._best, "to_beat": self._to_beat, "num_without": self._num_without}
        return {**state, "min_delta": self.min_delta, "is_asked": self.is_asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the evaluations of `state`, unless they followed another metric or the other direction."""
        self.falling.update(state.get("falling", {}))
        before = state.get("metric", self.metric), state.get("sign", self._sign)
        if before != (self.metric, self._sign):
            old, new = (
                f"the {'lowest' if sign > 0 else 'highest'} {metric}"
                for metric, sign in (before, (self.metric, self._sign))
            )
            self.say(f"from here on {new} defines the best step, instead of {old}")
            return
        self._best, self._to_beat = tuple(state["best"]), tuple(state["to_beat"])
        # Evaluations that did not improve by the old margin do not count for a new one.
        is_same = state.get("min_delta", self.min_delta) == self.min_delta
        self._num_without = state["num_without"] if is_same else 0


Span = tuple[str, float, float]
"""A name, a start and an end, in seconds."""
BREAK_S = 0.01
"""Spans of one name are joined if the break between them is shorter."""


class Timer:
    """Seconds spent in named spans, added up until they are drained.

    It reads the host's clock: work queued on an accelerator counts where the host waits for it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}
        """Seconds by name since the last drain."""
        self.spans: list[Span] = []
        """All spans since the last drain, ordered by their ends."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`, also if the block raises; nested spans count for both names."""
        start = self._clock()
        try:
            # A profile's trace shows the phases by name.
            with record_function(name):
                yield
        finally:
            end = self._clock()
            self.seconds[name] = self.seconds.get(name, 0.0) + end - start
            if self.spans and self.spans[-1][0] == name and start - self.spans[-1][2] < BREAK_S:
                start = self.spans.pop()[1]
            self.spans.append((name, start, end))

    def drain(self) -> dict[str, float]:
        """Return the seconds by name since the last drain, and reset seconds and spans."""
        drained, self.seconds, self.spans = self.seconds, {}, []
        return drained


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Logs, evaluates, saves and resumes a loop of `num_steps` steps; all ranks call the methods alike."""

    num_steps: int
    """Steps of the whole run."""
    sink: MetricSink
    say: Callable[[str], None] = print
    """Prints to the console."""
    evaluation: Evaluation | None = None
    evaluate_every: int = 1
    """Steps between evaluations; the run also evaluates before the first step and after the last step."""
    checkpoints: CheckpointStore | None = None
    uploads: HubUploads | None = None
    """Uploads of models to the Hub; None without them, and on ranks other than 0."""
    save_every: int = 1
    """Steps between checkpoints; the last step is saved too."""
    resume_step: int | None = None
    """Step of the checkpoint to resume from; None for a new run."""
    stopping: EarlyStopping = field(default_factory=EarlyStopping)
    """Tracks the best evaluation, and decides when to stop early."""
    after_save: Callable[[int], None] = lambda step: None
    """Called on all ranks after the checkpoint of a step, and again if an unfinished run resumes from it."""
    end_epoch: Callable[[int], None] = lambda epoch: None
    """Called at the end of an epoch with its number, from 1."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    """The user's code, called at evaluations, steps and checkpoints."""
    timer: Timer = field(default_factory=Timer)
    """Times evaluations, checkpoints and the loop's own phases."""
    held: list[tuple[int, dict[str, float], Callable[[], dict[str, float]]]] = field(default_factory=list)
    """The step whose evaluation is in flight, with its metrics and the function that waits; at most one."""

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        evaluation: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """Write the metrics of `step`, and the seconds of all phases since the last call.

        An `evaluation` that is still in flight keeps the step's metrics until the next `write` or `flush`.
        """
        self.flush()
        if step == 0:
            self.require_logged(step, metrics)
            self._stop_if(self.callbacks.carry_out(), step)
        values = {**metrics, **self.timer.drain()}
        values |= self.callbacks.take_logged(values)
        if evaluation is None:
            self.sink.write(step, values)
        else:
            self.held.append((step, values, evaluation))

    def flush(self) -> None:
        """Wait for the evaluation in flight, if there is one, and write the metrics of its step."""
        while self.held:
            step, values, evaluation = self.held.pop()
            with self.timer.span("time/evaluate_s"):
                self.sink.write(step, values | evaluation())

    def close(self) -> None:
        """Write the metrics of a step whose evaluation is still in flight, without the evaluation."""
        while self.held:
            step, values, _ = self.held.pop()
            self.sink.write(step, values)

    def require_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise `ConfigError` if the evaluations after `step` lack the metric to follow, except after the last step."""
        if step < self.num_steps:
            self.stopping.require_logged(metrics)

    def is_due(self, every: int, step: int) -> bool:
        """Whether `step` is a multiple of `every` or the last step."""
        return step % every == 0 or step == self.num_steps or self.stopping.is_over

    def end_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Call `on_step` of the callbacks; return whether they stop the run before its last step."""
        self.callbacks.call("on_step", step, dict(metrics))
        return self._stop_if(self.callbacks.carry_out(), step)

    def _stop_if(self, stops: bool, step: int) -> bool:
        if not stops or step == self.num_steps or self.stopping.is_over:
            return False
        self.stopping.is_asked = True
        self.say(f"stopped at step {step} by a callback")
        return True

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation if one is due."""
        if self.evaluation is None or not self.is_due(self.evaluate_every, step):
            return {}
        with self.timer.span("time/evaluate_s"):
            return self.evaluation.evaluate(step)

    def begin_evaluation(self, step: int) -> Callable[[], dict[str, float]] | None:
        """Begin an evaluation that the next step may overlap; return None if none is due or if it must not overlap.

        Early stopping, the best checkpoint, callbacks, a checkpoint of this step and the end of the run need its
        result before the next step.
        """
        waits = self.stopping.keeps_best or self.stopping.patience is not None or not self.callbacks.is_empty
        is_last = step == self.num_steps or self.stopping.is_over or self.is_save_due(step)
        if waits or is_last or self.evaluation is None or not self.is_due(self.evaluate_every, step):
            return None
        with self.timer.span("time/evaluate_s"):
            return self.evaluation.begin(step)

    def is_save_due(self, step: int) -> bool:
        """Whether a checkpoint of `step` will be saved."""
        is_due = self.callbacks.saves or step == self.stopping.best_step or self.is_due(self.save_every, step)
        return self.checkpoints is not None and is_due

    def say_padded(self, reason: str | None) -> None:
        """Print why rows are padded; None if they are not."""
        if reason is not None:
            self.say(f"rows are padded ({reason})")

    def save_if_due(
        self, step: int, models: Mapping[str, TrainedModel], state: Callable[[], dict[str, Any]]
    ) -> None:
        """Save the models and the loop's state if a checkpoint is due; after the last step, for a longer run later."""
        if self.checkpoints is not None and self.is_save_due(step):
            with self.timer.span("time/save_s"):
                folder = self.checkpoints.save(step, models, state() | {"watch": self.stopping.state_dict()})
            self.callbacks.saves = False
            self.callbacks.call("on_checkpoint", step, folder)
            self.after_save(step)
            # This step's evaluation and checkpoint are over: a run stops after the next step, which has both.
            self.callbacks.carry_out(may_stop=False)

    def resume(self, models: Mapping[str, TrainedModel]) -> dict[str, Any] | None:
        """Load the checkpoint into the models and return the loop's state; None in a new run."""
        if self.resume_step is None or self.checkpoints is None:
            return None
        saved = self.checkpoints.load(self.resume_step, models)
        is_finished = self.checkpoints.is_finished(self.resume_step)
        if "watch" in saved:
            self.stopping.load_state_dict(saved["watch"])
            # A run that a callback stopped stays stopped if it was killed before it wrote its final model. A finished
            # run is resumed to train longer.
            was_asked = saved["watch"].get("is_asked", False)
            self.stopping.is_asked = was_asked and not is_finished
        if not is_finished:
            # The run may have been killed right after it saved this checkpoint.
            self.after_save(self.resume_step)
        return saved


def num_multiplied(model: Any) -> float:
    """Count the weights that multiply every token: without embeddings, and with the chosen share of the experts.

    Tied embeddings count once if the model has an output layer.
    """
    config = model.config.get_text_config()
    num_experts, num_chosen = (
        next((value for name in names if type(value := getattr(config, name, None)) is int), None)
        for names in (EXPERTS, CHOSEN)
    )
    share = num_chosen / num_experts if num_experts and num_chosen else 1.0
    total = 0.0
    for name, parameter in model.named_parameters():
        is_stack = parameter.dim() == 3 and len(parameter) == num_experts
        total += parameter.numel() * (share if is_stack or "experts" in name.split(".") else 1)
    # Weights in 4 bits are packed buffers, no parameters.
    layers = [module for module in model.modules() if isinstance(module, NF4Linear)]
    total += sum(layer.in_features * layer.out_features for layer in layers)
    if model.config.tie_word_embeddings and model.get_output_embeddings() is not None:
        return total
    return total - model.get_input_embeddings().weight.numel()


def memory_bytes(device: str) -> int:
    """Return the peak device memory of torch on this rank; on CPU the current memory of the process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss
