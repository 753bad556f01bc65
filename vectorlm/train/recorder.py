"""What a training loop leaves behind: metrics, checkpoints and evaluations, each at its interval, and its times."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch.profiler import record_function

from vectorlm.errors import ConfigError
from vectorlm.settings import nearest
from vectorlm.types import Checkpoints, Evaluation, MetricSink, TrainedModel

FALLING = (
    *("loss", "perplexity", "bits_per_byte"),
    *("step_brier", "/kl", "rejected_reward", "wrong_probability"),
)
"""How metrics end of which the lowest is the best, unless a setting or the harness says otherwise."""
OWN = ("eval/accuracy", "eval/reward/")
"""How metrics of rewards begin, which are never guessed to fall."""


@dataclass
class EarlyStopping:
    """Follows one metric of a run; the evaluation before training does not count. All ranks call each method alike."""

    metric: str = "eval/loss"
    """Its direction is `mode`, that of a task in the harness, or falling for the names in `FALLING`."""
    patience: int | None = None
    """Training is over after this many evaluations in a row without improvement; None lets it run to its end."""
    min_delta: float = 0.0
    """How much better an evaluation must be to count as an improvement."""
    is_named: bool = False
    """Whether the config names the metric."""
    keeps_best: bool = False
    """Whether the best evaluation has a checkpoint."""
    mode: Literal["max", "min"] | None = None
    """Whether the highest or the lowest value is the best."""
    falling: dict[str, bool] = field(default_factory=dict)
    """Of metrics of the harness: whether the lowest is the best; evaluations fill it."""
    say: Callable[[str], None] = print
    is_asked: bool = False
    """Whether the user has ended the run."""

    def __post_init__(self) -> None:
        self._best: tuple[float, int | None] = (math.inf, None)
        # What the next evaluation must beat by min_delta, in the direction that falls.
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
        """The step of the best checkpoint; None where none is kept."""
        return self._best[1]

    @property
    def is_over(self) -> bool:
        """Whether training has not improved for as many evaluations as `patience` allows, or the user ended it."""
        return self.is_asked or (self.patience is not None and self._num_without >= self.patience)

    def require_logged(self, metrics: Mapping[str, float]) -> None:
        """Raise `ConfigError` where `metrics`, of all evaluations of a step, lack the metric that a config names."""
        if self.is_named and not self._was_logged and self.metric not in metrics:
            known = sorted(name for name in metrics if name.startswith("eval/"))
            rule = f"is not logged: it must be one of {', '.join(known) or 'none'}."
            raise ConfigError(
                f"train_parameters.best_metric={self.metric!r} {rule} {nearest(self.metric, known)}".rstrip()
            )

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take the metrics of an evaluation after `step`, and return more of them."""
        self._was_logged |= self.metric in metrics
        if step == 0 or self.metric not in metrics:
            return {}
        # A reward that draws at random gives each rank another accuracy.
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
            self.say(
                f"stopped early at step {step}: {self.metric} has not improved{by} in {self._num_without} "
                f"evaluations{to_beat}"
            )
        return {"eval/stopped_early": float(self.is_over)}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "metric": self.metric,
            "best": self._best,
            "to_beat": self._to_beat,
            "num_without": self._num_without,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the evaluations of `state`; of another metric they say nothing."""
        if (before := state.get("metric", self.metric)) != self.metric:
            self.say(f"the best step is chosen by {self.metric} from here on; it was by {before}")
            return
        self._best, self._to_beat = tuple(state["best"]), tuple(state["to_beat"])
        self._num_without = state["num_without"]


OnStep = Callable[[int, dict[str, Any], list[dict[str, Any]]], Any]
"""Takes a step, its metrics and its rollouts; True ends the run after the step."""
Span = tuple[str, float, float]
"""A name, a start and an end, in seconds."""
BREAK_S = 0.01
"""Two spans of one name with a shorter break between them become one."""


class Timer:
    """Add up the seconds spent in named spans, until they are drained.

    It reads the host's clock: work queued on an accelerator counts where the host waits for it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}
        """Seconds by name since the last drain."""
        self.spans: list[Span] = []
        """Every span since the last drain, in the order of their ends."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`, also when the block raises; nested spans count for both names."""
        start = self._clock()
        try:
            # So that a profile's trace names the phases.
            with record_function(name):
                yield
        finally:
            end = self._clock()
            self.seconds[name] = self.seconds.get(name, 0.0) + end - start
            if self.spans and self.spans[-1][0] == name and start - self.spans[-1][2] < BREAK_S:
                start = self.spans.pop()[1]
            self.spans.append((name, start, end))

    def drain(self) -> dict[str, float]:
        """Return the seconds by name since the last drain, and start again, without spans."""
        drained, self.seconds, self.spans = self.seconds, {}, []
        return drained


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Logs, evaluates, saves and resumes a loop of `num_steps` steps; all ranks call each method alike."""

    num_steps: int
    """Steps of the whole run."""
    sink: MetricSink
    say: Callable[[str], None] = print
    """Shows text on the console."""
    evaluation: Evaluation | None = None
    evaluate_every: int = 1
    """Steps between two evaluations; there is one before training and one at the end too."""
    checkpoints: Checkpoints | None = None
    save_every: int = 1
    """Steps between two checkpoints; there is one at the end too."""
    resume_step: int | None = None
    """The step of the checkpoint to resume from; None in a new run."""
    stopping: EarlyStopping = field(default_factory=EarlyStopping)
    """Follows the evaluations: which one was the best, and whether training still improves."""
    end_epoch: Callable[[int], None] = lambda epoch: None
    """Called at the end of each epoch, with its number from 1."""
    on_step: OnStep | None = None
    """Called on rank 0 after each step."""
    timer: Timer = field(default_factory=Timer)
    """Times evaluations and checkpoints, and whatever the loop times with it."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`, with the seconds of each phase since the last line."""
        if step == 0:
            self.require_logged(step, metrics)
        self.sink.write(step, {**metrics, **self.timer.drain()})

    def require_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise `ConfigError` where all evaluations after `step` lack the metric to follow; never at the run's end."""
        if step < self.num_steps:
            self.stopping.require_logged(metrics)

    def is_due(self, every: int, step: int) -> bool:
        """Whether `step` is a multiple of `every` or the last step."""
        return step % every == 0 or step == self.num_steps or self.stopping.is_over

    def ends_by_user(
        self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Show `on_step` copies of what the step has made; return whether the run ends now, and would not have."""
        if self.on_step is None or step == self.num_steps or self.stopping.is_over:
            return False
        is_alone = not dist.is_initialized()
        ends = [False]
        if is_alone or dist.get_rank() == 0:
            # It may draw random numbers: nothing of the run changes with them.
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            with torch.random.fork_rng(devices):
                ends = [
                    self.on_step(step, dict(metrics), copy.deepcopy([dict(each) for each in rollouts]))
                    is True
                ]
        if not is_alone:
            dist.broadcast_object_list(ends)
        if ends[0]:
            self.stopping.is_asked = True
            self.say(f"stopped at step {step}, as on_step asked")
        return ends[0]

    def evaluate_if_due(self, step: int) -> dict[str, float]:
        """Evaluate where an evaluation is due, and return its metrics."""
        if self.evaluation is None or not self.is_due(self.evaluate_every, step):
            return {}
        with self.timer.span("time/evaluate_s"):
            return self.evaluation.evaluate(step)

    def say_padded(self, reason: str | None) -> None:
        """Say why rows are padded, if they are."""
        if reason is not None:
            self.say(f"rows are padded ({reason})")

    def save_if_due(
        self, step: int, models: Mapping[str, TrainedModel], state: Callable[[], dict[str, Any]]
    ) -> None:
        """Save the models and the loop's own state where a checkpoint is due: a longer run may go on from the last."""
        is_due = step == self.stopping.best_step or self.is_due(self.save_every, step)
        if self.checkpoints is not None and is_due:
            with self.timer.span("time/save_s"):
                self.checkpoints.save(step, models, state() | {"watch": self.stopping.state_dict()})

    def resume(self, models: Mapping[str, TrainedModel]) -> dict[str, Any] | None:
        """Load the checkpoint into the models and return the loop's own state; None in a new run."""
        if self.resume_step is None or self.checkpoints is None:
            return None
        saved = self.checkpoints.load(self.resume_step, models)
        if "watch" in saved:
            self.stopping.load_state_dict(saved["watch"])
        return saved


def num_multiplied(model: Any, has_tied_head: bool) -> int:
    """Count the weights that a token is multiplied with: of the embeddings it only reads one row."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return total if has_tied_head else total - model.get_input_embeddings().weight.numel()


def memory_bytes(device: str) -> int:
    """Return the most device memory that torch has held on this rank; on CPU, what its process holds now."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss
