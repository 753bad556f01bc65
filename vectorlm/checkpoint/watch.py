"""Which evaluation of a run was the best so far, and whether training still improves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from vectorlm.checkpoint.settings import KeepSettings


class BestWatch:
    """Follows one metric of a run; the evaluation before training does not count. All ranks call each method alike.

    Of ``eval/loss`` the lowest is the best, of ``eval/accuracy`` the highest.
    """

    def __init__(self, metric: str, settings: KeepSettings, say: Callable[[str], None] = print) -> None:
        self._metric, self._settings, self._say = metric, settings, say
        self._sign = 1.0 if metric == "eval/loss" else -1.0
        self._best: tuple[float, int | None] = (math.inf, None)
        # What the next evaluation must beat by min_delta, in the direction that falls.
        self._to_beat: tuple[float, int | None] = (math.inf, None)
        self._num_without = 0

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint; None where none is kept."""
        return self._best[1]

    @property
    def is_over(self) -> bool:
        """Whether training has not improved for as many evaluations as the settings allow."""
        patience = self._settings.early_stopping_patience
        return patience is not None and self._num_without >= patience

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take the metrics of an evaluation after `step`, and return more of them."""
        if step == 0 or self._metric not in metrics:
            return {}
        value = self._sign * _of_main(metrics[self._metric])
        if self._settings.keep_best and value < self._best[0]:
            self._best = (value, step)
        patience, min_delta = (
            self._settings.early_stopping_patience,
            self._settings.early_stopping_min_delta,
        )
        if patience is None:
            return {}
        if value < self._to_beat[0] - min_delta:
            self._to_beat, self._num_without = (value, step), 0
        else:
            self._num_without += 1
        if self.is_over:
            self._say(self._why(step, min_delta))
        return {"eval/stopped_early": float(self.is_over)}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"best": self._best, "to_beat": self._to_beat, "num_without": self._num_without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the evaluations of `state`."""
        self._best, self._to_beat = tuple(state["best"]), tuple(state["to_beat"])
        self._num_without = state["num_without"]

    def _why(self, step: int, min_delta: float) -> str:
        value, at = self._to_beat
        to_beat = "" if at is None else f" (to beat: {self._sign * value:.4f} of step {at})"
        by = f" by more than {min_delta:g}" if min_delta else ""
        return (
            f"stopped early at step {step}: {self._metric} has not improved{by} in {self._num_without} "
            f"evaluations{to_beat}"
        )


def _of_main(value: float) -> float:
    """Return rank 0's value on every rank: a reward that draws at random gives each rank another accuracy."""
    agreed = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(agreed)
    return agreed[0]
