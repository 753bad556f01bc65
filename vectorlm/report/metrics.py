"""Sinks: where the metrics of a training step are written; docs/metrics.md lists them."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

from tqdm import tqdm

from vectorlm.report.step_lines import StepLines
from vectorlm.types import MetricSink

FEW_STEPS = 30
"""A run of as many steps prints a line for each."""


class Sink(MetricSink, AbstractContextManager[Any], Protocol):
    """A sink that is closed as a context manager."""


class JsonlSink:
    """Write one JSON line per call, ``{"step": 10, "train/loss": 2.31, …}``, on disk when the call returns.

    NaN and infinity, which JSON cannot hold, are written as null. The arguments are those of `StepLines`.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        self._lines = StepLines(path, resume_step, key="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the line of `step`."""
        self._lines.write(step, [{name: float(value) for name, value in values.items()}])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass  # each line is in the file already


# What moves a cursor, changes colours or turns text round, but for the line break and the tab.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text for a console, with escapes for control characters: a model may write any."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


_SHOWN = {
    "train/loss": "loss {:.4f}",
    "reward/mean": "reward {:.3f}",
    "policy/entropy": "entropy {:.2f}",
    "time/step_s": "{:.2f} s a step",
    "train/learning_rate": "lr {:.2e}",
    "train/tokens_per_s": "{:,.0f} tokens/s",
    "eval/loss": "eval loss {:.4f}",
    "eval/accuracy": "right {:.0%}",
    "eval/reward": "mean reward {:.3g}",
    "eval/pair_accuracy": "pairs right {:.0%}",
    "eval/step_accuracy": "steps right {:.0%}",
}


class ProgressSink:
    """Show the progress of a run: a bar in a terminal, plain lines in a log file.

    Outside a terminal a run of few steps prints a line for each. A longer one prints a line at most every `interval_s`,
    or every step where steps take longer than half of it, and always for an evaluation and for the last step.

    Args:
        total_steps: Optimizer steps of the whole run.
        initial_step: Steps that an earlier run already made.
        interval_s: Seconds between plain lines.
        stream: Where to print; None is standard error.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        total_steps: int,
        initial_step: int = 0,
        interval_s: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._interval_s = interval_s
        self._stream = stream or sys.stderr
        self._clock = clock
        self._latest: dict[str, tuple[int, float]] = {}
        self._is_short = total_steps - initial_step <= FEW_STEPS
        self._next_line_s = self._last_step_s = clock()
        self._bar: tqdm | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total_steps, initial=initial_step, unit="step", file=self._stream, dynamic_ncols=True
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show `step` with the newest loss, learning rate, tokens/s and evaluation."""
        self._latest |= {name: (step, value) for name, value in values.items()}
        _, accuracy = self._latest.get("eval/accuracy", (0, 0.0))
        _, reward = self._latest.get("eval/reward", (0, accuracy))
        hidden = "eval/reward"
        if not math.isclose(reward, accuracy, abs_tol=1e-6):
            # A graded reward, of a judge for example, may never be 1.
            hidden = "" if accuracy else "eval/accuracy"
        shown = ", ".join(
            form.format(self._latest[name][1]) + self._since(name, step)
            for name, form in _SHOWN.items()
            if name in self._latest and name != hidden
        )
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._is_due(step, values, now := self._clock()):
            self._next_line_s = now + self._interval_s
            line = f"step {step}/{self._total_steps}" + (f": {shown}" if shown else "")
            print(line, file=self._stream, flush=True)

    def _since(self, name: str, step: int) -> str:
        """Name the step of an evaluation that is not of this step."""
        evaluated = self._latest[name][0]
        return f" at step {evaluated}" if name.startswith("eval/") and evaluated != step else ""

    def _is_due(self, step: int, values: Mapping[str, float], now: float) -> bool:
        is_slow = now - self._last_step_s > self._interval_s / 2
        self._last_step_s = now
        is_evaluation = any(name.startswith("eval/") for name in values)
        is_last = step >= self._total_steps
        return self._is_short or is_slow or is_evaluation or is_last or now >= self._next_line_s

    def say(self, text: str) -> None:
        """Print `text` on separate lines, above the bar."""
        text = printable(text)
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            tqdm.write(text, file=self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


class FanOut:
    """Write to several sinks as if they were one."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write to every sink, in order."""
        for sink in self._sinks:
            sink.write(step, values)
