"""The learning rate of each optimizer step."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from vectorlm.errors import ConfigError

PLATEAU_NAMES = ("plateau-with-warmup", "plataeu-with-warmup", "reduce_lr_on_plateau")
"""Spellings of the plateau schedule; the second is VectorLM's own."""
BY_LOSS = (*PLATEAU_NAMES, "greedy")
"""Schedules that wait for evaluation losses."""


class Schedule:
    """Sets the learning rate: call `step` after each optimizer step, `observe` after each evaluation.

    Most schedules of transformers depend on the step alone. ``plateau-with-warmup`` rises linearly, step k of
    W using lr (k + 1) / (W + 1), then falls each time the evaluation loss has stopped falling (torch's
    ReduceLROnPlateau); ``greedy`` does so with transformers' GreedyLR, which may rise again, up to the peak.
    """

    def __init__(self, name: str, optimizer: Optimizer, *, num_warmup_steps: int, num_steps: int) -> None:
        """Set the learning rate of the first step.

        Args:
            name: A transformers ``SchedulerType`` or one of `PLATEAU_NAMES`.
            optimizer: Its groups hold the peak learning rate.
            num_warmup_steps: Optimizer steps during which the learning rate rises.
            num_steps: Optimizer steps of the whole run.

        Raises:
            ConfigError: The name is unknown, or that schedule needs arguments of its own.
        """
        self._optimizer = optimizer
        self._by_step: LRScheduler | None = None
        self._by_loss: Any = None
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._num_warmup_steps = num_warmup_steps
        self._num_steps_done = 0
        if name in PLATEAU_NAMES:
            self._by_loss = ReduceLROnPlateau(optimizer)
        elif name == "greedy":
            self._by_loss = _transformers_schedule(name, optimizer, num_warmup_steps, num_steps)
        else:
            self._by_step = _transformers_schedule(name, optimizer, num_warmup_steps, num_steps)
        if self._by_loss is not None:
            self._warm_up()

    @property
    def learning_rate(self) -> float:
        """The learning rate that the next optimizer step will use."""
        return self._optimizer.param_groups[0]["lr"]

    def step(self) -> None:
        """Move on to the next optimizer step."""
        self._num_steps_done += 1
        if self._by_step is not None:
            self._by_step.step()
        elif self._num_steps_done <= self._num_warmup_steps:
            self._warm_up()

    def observe(self, eval_loss: float) -> None:
        """Take note of an evaluation loss: plateau and greedy schedules act on it, after their warmup."""
        if self._by_loss is not None and self._num_steps_done >= self._num_warmup_steps:
            self._by_loss.step(eval_loss)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the optimizer's own state."""
        inner = self._by_step or self._by_loss
        return {"num_steps_done": self._num_steps_done, "inner": inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the learning rate itself comes back with the optimizer's state."""
        inner = self._by_step or self._by_loss
        self._num_steps_done = state["num_steps_done"]
        inner.load_state_dict(state["inner"])

    def _warm_up(self) -> None:
        share = (self._num_steps_done + 1) / (self._num_warmup_steps + 1)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * share


def _transformers_schedule(
    name: str, optimizer: Optimizer, num_warmup_steps: int, num_steps: int
) -> LRScheduler:
    from transformers import SchedulerType, get_scheduler

    known = [*(kind.value for kind in SchedulerType), PLATEAU_NAMES[0]]
    if name not in known:
        raise ConfigError(f"lr_scheduler_type={name!r} is unknown: it must be one of {', '.join(known)}.")
    # GreedyLR's own bounds (1e-3 to 1) would lift any usual learning rate by orders of magnitude.
    bounds = {"min_lr": 0.0, "max_lr": [group["lr"] for group in optimizer.param_groups]}
    try:
        return get_scheduler(
            name, optimizer, num_warmup_steps, num_steps, bounds if name == "greedy" else None
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"lr_scheduler_type={name!r} needs settings of its own ({error}). "
            "Use linear, cosine, constant_with_warmup or plateau-with-warmup."
        ) from error
