"""Which evaluation of a run was the best so far, and whether training still improves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from vectorlm.errors import ConfigError
from vectorlm.settings import nearest

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
