"""Sinks: where the numbers of a training step go.

Names in use: ``train/loss train/learning_rate train/grad_norm train/tokens_per_s train/step_s eval/loss
eval/accuracy sampler/tokens_per_s sampler/generate_s weights/publish_s weights/load_s weights/update_s``; those of
reinforcement learning are in docs/metrics.md.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from tqdm import tqdm

from vectorlm.errors import CheckpointError, ConfigError


class MetricSink(Protocol):
    """Takes the numbers of each logged step; a context manager that closes itself."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the `values` of training step `step`."""
        ...

    def close(self) -> None:
        """Finish what was begun; closing twice is allowed."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class JsonlSink:
    """Write one JSON line per call, ``{"step": 10, "train/loss": 2.31, …}``, on disk when the call returns.

    A number that JSON cannot hold (NaN, infinity) is written as null.

    Args:
        path: The file; its folder is made. Without `resume_step` an existing file is replaced.
        resume_step: The step that training resumes from: lines of later steps, which will be written again,
            and a last line cut short by a crash are dropped, in one atomic replacement of the file.

    Raises:
        CheckpointError: A line before the last one is not a metrics line, so the file is not of this run.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None and path.exists():
            _replace_text(path, "".join(_lines_until(path, resume_step)))
        self._file = path.open("w" if resume_step is None else "a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the line of `step`."""
        numbers = {name: float(value) for name, value in values.items()}
        line = {"step": step} | {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _lines_until(path: Path, last_step: int) -> Iterator[str]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            keep = json.loads(line)["step"] <= last_step and line.endswith("\n")
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise CheckpointError(
                    f"cannot resume the metrics file {path}: line {number} is {line.strip()[:80]!r}, but "
                    "every line must be a JSON object with a 'step'. Repair the line or move the file away."
                ) from error
            keep = False
        if keep:
            yield line


def _replace_text(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


class WandbSink:
    """Send the numbers to Weights & Biases; with ``mode: offline`` they stay in a local folder.

    Args:
        settings: Keyword arguments of ``wandb.init``: ``project``, ``name``, ``entity``, ``mode``, ``dir`` ….
        run_config: The resolved config, shown beside the run.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, settings: Mapping[str, Any], run_config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ConfigError(
                "enable_wandb_logging=true needs the package wandb, which is not installed. "
                "Install it with `pip install wandb`, or set enable_wandb_logging: false."
            ) from error
        self._run = wandb.init(**settings, config=dict(run_config))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values; several calls for one step become one row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run and wait until everything is sent or saved."""
        self._run.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._run.finish(exit_code=0 if kind is None else 1)


_SHOWN: dict[str, Callable[[float], str]] = {
    "train/loss": lambda x: f"loss {x:.4f}",
    "reward/mean": lambda x: f"reward {x:.3f}",
    "policy/entropy": lambda x: f"entropy {x:.2f}",
    "time/step_s": lambda x: f"{x:.2f} s a step",
    "train/learning_rate": lambda x: f"lr {x:.2e}",
    "train/tokens_per_s": lambda x: f"{x:,.0f} tokens/s",
    "eval/loss": lambda x: f"eval loss {x:.4f}",
    "eval/accuracy": lambda x: f"right {x:.0%}",
}


class ProgressSink:
    """Show a person how far the run is: a bar in a terminal, plain lines in a log file.

    Outside a terminal a line is printed at most every `interval_s`, but always for an evaluation and for the
    last step.

    Args:
        total_steps: The number of optimizer steps in the whole run.
        initial_step: The steps that an earlier run already made.
        interval_s: Seconds between plain lines.
        stream: Where to show it; standard error when None.
        clock: Returns seconds that never run backwards.
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
        self._latest: dict[str, float] = {}
        self._next_line_s = clock()
        self._bar: tqdm | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total_steps, initial=initial_step, unit="step", file=self._stream, dynamic_ncols=True
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show `step` with the newest loss, learning rate, tokens/s and evaluation."""
        self._latest.update(values)
        shown = ", ".join(show(self._latest[name]) for name, show in _SHOWN.items() if name in self._latest)
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._is_due(step, values):
            self._next_line_s = self._clock() + self._interval_s
            print(f"step {step}/{self._total_steps}: {shown}", file=self._stream, flush=True)

    def _is_due(self, step: int, values: Mapping[str, float]) -> bool:
        is_evaluation = any(name.startswith("eval/") for name in values)
        return is_evaluation or step >= self._total_steps or self._clock() >= self._next_line_s

    def say(self, text: str) -> None:
        """Print `text` on lines of its own, above the bar."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            tqdm.write(text, file=self._stream)

    def close(self) -> None:
        """Leave the bar as it is and move to a new line."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class FanOut:
    """Write to several sinks as if they were one, and close them all even when one of them fails."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write to every sink, in order."""
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        """Close every sink, the last one first."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for sink in self._sinks:
                # Each sink hears of the error, so that a remote run is marked as failed.
                stack.push(lambda *_, sink=sink: sink.__exit__(kind, error, trace))
