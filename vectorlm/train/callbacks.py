"""Call the user's callbacks during a run, and apply their requests on all ranks."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vectorlm.errors import ConfigError
from vectorlm.plugin import load_plugin
from vectorlm.settings import nearest
from vectorlm.train.optimizer_step import Schedule

HOOKS = ("on_step", "on_rollouts", "on_evaluation", "on_checkpoint")
"""Methods of a callback, which needs at least one of them."""


class RunControl:
    """The run as a callback sees it: log metrics, write checkpoints, stop, and change the learning rate."""

    def __init__(self, output_dir: Path, schedule: Schedule, *, saves_checkpoints: bool) -> None:
        self.output_dir = output_dir
        """Folder of the run."""
        self._schedule, self._saves_checkpoints = schedule, saves_checkpoints
        self._logged: dict[str, float] = {}
        self._stops = self._saves = False
        self._learning_rate: float | None = None

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the line of this step in ``metrics.jsonl`` and to the trackers.

        Metrics that `on_checkpoint` logs are added to the next step, because this step is already written.
        """
        self._logged |= {name: float(value) for name, value in metrics.items()}

    def stop(self) -> None:
        """End the run after this step (in `on_checkpoint`: the next) with an evaluation and a final model."""
        self._stops = True

    def save(self) -> None:
        """Write a checkpoint after this step; if called before the first step, after the first.

        Raises:
            ConfigError: `train_parameters.checkpointing_enabled` is False.
        """
        if not self._saves_checkpoints:
            raise ConfigError(
                "train_parameters.checkpointing_enabled=False: run.save() needs checkpoints. Set it to True."
            )
        self._saves = True

    @property
    def learning_rate(self) -> float:
        """Learning rate of the policy in the next step. A value that you set replaces the schedule from then on.

        A checkpoint of this step includes the value, unless `on_checkpoint` sets it.
        """
        return self._schedule.learning_rate if self._learning_rate is None else self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"run.learning_rate={value!r}: the learning rate must be a finite number >= 0.")
        self._learning_rate = float(value)


class Callbacks:
    """The callbacks of a run. Rank 0 calls them; their requests apply to all ranks.

    A callback may draw random numbers of torch without changing the run. Its hooks receive copies.
    """

    def __init__(self, callbacks: Sequence[Any] = (), control: RunControl | None = None) -> None:
        """Take objects or names ``file.py:NAME``, the same on all ranks; callbacks need a `control`."""
        is_main = not dist.is_initialized() or dist.get_rank() == 0
        self._control = control if callbacks else None
        self.is_empty = not callbacks
        self.saves = False
        """Whether a callback asked for a checkpoint after this step."""
        self._callbacks = [load_callback(callback) for callback in callbacks] if is_main else []

    def call(self, hook: str, step: int, given: Any) -> None:
        """Call ``hook(run, step, given)`` of every callback that has this method."""
        functions = [getattr(callback, hook) for callback in self._callbacks if hasattr(callback, hook)]
        for function in functions:
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            with torch.random.fork_rng(devices):
                function(self._control, step, copy.deepcopy(given))

    def take_logged(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that callbacks logged since the last call, to be written with `metrics`.

        Raises:
            ConfigError: A callback logged ``step``, or a metric that the run logs too.
        """
        if self._control is None:
            return {}
        logged, self._control._logged = self._control._logged, {}
        # Lines of metrics.jsonl have the number of the step under the key "step".
        if taken := sorted(logged.keys() & {"step", *metrics}):
            raise ConfigError(
                f"run.log: the run logs a metric {taken[0]!r} itself. Use another name in your callback."
            )
        return logged

    def carry_out(self, *, may_stop: bool = True) -> bool:
        """Set the learning rate and `saves` on all ranks as callbacks requested; return whether the run must stop.

        Without `may_stop`, a request to stop waits for the next call.
        """
        if (control := self._control) is None:
            return False
        asked = [(control._stops and may_stop, control._saves, control._learning_rate)]
        if dist.is_initialized():
            dist.broadcast_object_list(asked)
        stops, saves, learning_rate = asked[0]
        self.saves |= saves
        if learning_rate is not None:
            control._schedule.hold(learning_rate)
        control._stops = control._stops and not may_stop
        control._saves, control._learning_rate = False, None
        return stops


def load_callback(callback: Any) -> Any:
    """Return a callback; a class, or the name ``file.py:NAME`` of a class, is instantiated.

    Raises:
        ConfigError: The class does not exist or needs arguments, or the object has no hook.
    """
    found = require_callback(callback)
    return found() if inspect.isclass(found) else found


def require_callback(callback: Any) -> Any:
    """Return the class or object of a callback, without an instance of the class.

    Raises:
        ConfigError: The class does not exist or needs arguments, or there is no hook, or an unknown method ``on_…``.
    """
    name = callback if isinstance(callback, str) else getattr(callback, "__name__", type(callback).__name__)
    callback, rule = load_plugin(callback) if isinstance(callback, str) else callback, ""
    own = [method for method in dir(callback) if method.startswith("on_")]
    unknown = [method for method in own if method not in HOOKS]
    if inspect.isclass(callback) and not _can_be_made(callback):
        rule = "the class must not need arguments. Give them defaults."
    elif unknown:
        rule = f"{unknown[0]!r} is not a hook: use {', '.join(HOOKS)}. {nearest(unknown[0], HOOKS)}".rstrip()
    elif not own:
        rule = f"a callback needs at least one of the methods {', '.join(HOOKS)}. Add one."
    if rule:
        raise ConfigError(f"callbacks={name!r}: {rule}")
    return callback


def _can_be_made(make: Callable[..., Any]) -> bool:
    try:
        inspect.signature(make).bind()
    except TypeError:
        return False
    except ValueError:  # Some classes have no signature.
        pass
    return True
