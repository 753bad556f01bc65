"""Sinks of metrics: file, console, profile and trackers; docs/metrics.md lists the metrics."""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

import yaml
from tqdm import tqdm

from vectorlm.plugin import is_plugin, load_plugin, raised_at
from vectorlm.report.panels import PhaseTimes
from vectorlm.report.runs import flat
from vectorlm.report.step_lines import StepLines
from vectorlm.types import MetricSink

if TYPE_CHECKING:
    from vectorlm.train.recorder import Timer  # it imports torch, which reading a run does not need

Say = Callable[[str], None]
FEW_STEPS = 30
"""A run of at most this many steps prints a line for every step."""
WARMUP_STEPS = 2
"""Steps that a profile skips: they allocate memory and compile kernels."""
MAX_BYTES = 32 << 20
"""Size of the traces, in bytes, at which a profile stops recording steps."""
OF_ACCELERATE = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab")
"""Trackers that accelerate opens; their packages have the same names."""
TRACKERS = {
    "tensorboard": "tensorboardX",
    "trackio": "trackio",
    **{name: name for name in OF_ACCELERATE},
}
"""The names that `trackers` accepts besides ``file.py:NAME``, with the packages that they need."""


class Sink(MetricSink, AbstractContextManager[Any], Protocol):
    """A sink of metrics that is closed as a context manager."""


class FanOut:
    """A sink that writes to several sinks."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write to every sink, in order."""
        for sink in self._sinks:
            sink.write(step, values)


class JsonlSink(AbstractContextManager[Any]):
    """A sink that writes one JSON line per call, ``{"step": 10, "train/loss": 2.31, …}``, before the call returns.

    NaN and infinity become null, because JSON has no form for them. The arguments are the same as for `StepLines`.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        self._lines = StepLines(path, resume_step, key="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the line of `step`."""
        self._lines.write(step, [{name: float(value) for name, value in values.items()}])

    def __exit__(self, *error: object) -> None:
        pass  # every line is in the file already


# Characters that move a cursor, change colours or reverse text, except line break and tab.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text for a console, with escapes for control characters, because a model may write any of them."""
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
    """A sink that shows the progress of a run: a bar in a terminal, plain lines in a log file.

    Outside a terminal, a run of few steps prints a line per step. A longer run prints at most one line per
    `interval_s`, or every step if a step takes longer than half of it. It always prints evaluations and the last step.

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
        """Show `step` with the newest loss, learning rate and tokens/s, and its evaluation."""
        self._latest |= {name: (step, value) for name, value in values.items()}
        _, accuracy = self._latest.get("eval/accuracy", (0, 0.0))
        _, reward = self._latest.get("eval/reward", (0, accuracy))
        hidden = "eval/reward"
        if not math.isclose(reward, accuracy, abs_tol=1e-6):
            # A graded reward, for example of a judge, may never be 1.
            hidden = "" if accuracy else "eval/accuracy"
        shown = []
        for name, form in _SHOWN.items():
            if name in self._latest and name != hidden:
                at, value = self._latest[name]
                is_old = name.startswith("eval/") and at != step
                # The bar is a single line and repeats the last evaluation. Plain lines print it once.
                if not is_old or self._bar is not None:
                    shown.append(form.format(value) + (f" at step {at}" if is_old else ""))
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(shown), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = self._clock()
        is_slow = now - self._last_step_s > self._interval_s / 2
        self._last_step_s = now
        is_evaluation = any(name.startswith("eval/") for name in values)
        is_last = step >= self._total_steps
        if self._is_short or is_slow or is_evaluation or is_last or now >= self._next_line_s:
            self._next_line_s = now + self._interval_s
            line = f"step {step}/{self._total_steps}" + (f": {', '.join(shown)}" if shown else "")
            print(line, file=self._stream, flush=True)

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


def short_run(profile_steps: int, num_steps: int) -> tuple[str, str] | None:
    """Return why a profile of `num_steps` steps would record nothing, and the fix; None if it records something."""
    if not profile_steps or num_steps > WARMUP_STEPS:
        return None
    rule = f"records nothing in a run of {num_steps} steps, because it skips the first {WARMUP_STEPS}"
    return rule, "Set it to 0, or train longer."


class ProfileSink:
    """A sink that records a trace of some steps, and writes a table of times to ``profile.txt``.

    Open a trace, ``trace-step-<n>.json.gz``, in chrome://tracing or ui.perfetto.dev.
    """

    def __init__(
        self,
        folder: Path,
        num_traced: int,
        *,
        timer: Timer,
        initial_step: int = 0,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Record `num_traced` steps, from the third after `initial_step`; `timer` has the times of the start."""
        self._folder, self._timer, self._say, self._clock = folder, timer, say, clock
        self._first = initial_step + WARMUP_STEPS
        self._last = self._first + num_traced
        self._times, self._num_steps = PhaseTimes(), 0
        self._began = clock() - sum(timer.seconds.values())
        self._profiler: Any = None
        self._num_bytes = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """End the trace of `step`, and begin a trace of the next step if it is to be recorded."""
        self._times.add(values)
        self._num_steps += step > 0
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            path = self._folder / f"trace-step-{step}.json.gz"
            profiler.export_chrome_trace(str(path))
            self._num_bytes += path.stat().st_size
            self._say(f"profile: {path}")
            if self._num_bytes >= MAX_BYTES and step < self._last:
                self._say(
                    f"profile: the traces have {self._num_bytes >> 20} MiB; later steps are not recorded"
                )
        if self._first <= step < self._last and self._num_bytes < MAX_BYTES:
            from torch.profiler import profile, supported_activities

            self._profiler = profile(activities=supported_activities())
            self._profiler.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._profiler is not None:
            self._profiler.stop()
        self._times.add(self._timer.drain())
        text = self._times.table(self._clock() - self._began, self._num_steps)
        (self._folder / "profile.txt").write_text(text + "\n", encoding="utf-8")
        self._say(text)


class Tracker(AbstractContextManager[Any]):
    """A sink that sends metrics to another program; it prints the program's errors, and the run continues.

    `log` gets the values and the step, and `close` whether the run failed.
    """

    def __init__(
        self, log: Callable[[dict[str, float], int], Any], close: Callable[[bool], Any], say: Say
    ) -> None:
        self._log, self._close, self._say = log, close, say
        self._num_missed = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log a copy of the values; print the first error."""
        try:
            self._log(dict(values), step)
        except (Exception, SystemExit) as error:
            self._num_missed += 1
            if self._num_missed == 1:
                self._say(f"warning: step {step}: a tracker failed, and the run goes on: {raised_at(error)}")

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._num_missed:
            self._say(f"warning: a tracker misses {self._num_missed} steps, which metrics.jsonl has")
        try:
            self._close(kind is not None)
        except (Exception, SystemExit) as failure:
            self._say(f"warning: a tracker could not be closed: {raised_at(failure)}")


def open_trackers(
    trackers: Mapping[str, Mapping[str, Any] | None],
    output: Path,
    run_config: Mapping[str, Any],
    resume_step: int | None,
    say: Say = print,
) -> list[Tracker]:
    """Open the trackers of a run; `trackers` has their arguments by name, `resume_step` is None for a new run."""
    found = []
    for name, given in trackers.items():
        arguments = given or {}
        if is_plugin(name):
            found.append(_open_own(load_plugin(name)(dict(run_config), **arguments), say))
        elif name == "tensorboard":
            placed = {"logdir": str(output / "tensorboard"), **arguments}
            found.append(_open_tensorboard(placed, run_config, resume_step, say))
        elif name in OF_ACCELERATE:
            found.append(_open_of_accelerate(name, arguments, output, run_config, resume_step, say))
        else:
            resume = "never" if resume_step is None else "allow"
            named = {"project": "vectorlm", "name": output.resolve().name, "resume": resume}
            found.append(_open_trackio({**named, **arguments}, run_config, say))
    return found


def _open_own(tracker: Any, say: Say) -> Tracker:
    """Wrap the user's tracker, an object with ``write(metrics, step)`` and ``close()``."""
    return Tracker(tracker.write, lambda failed: tracker.close(), say)


def _open_tensorboard(
    arguments: Mapping[str, Any], run_config: Mapping[str, Any], resume_step: int | None, say: Say
) -> Tracker:
    """Write TensorBoard's event files with a ``SummaryWriter`` of tensorboardX that takes the `arguments`."""
    from tensorboardX import SummaryWriter

    # TensorBoard hides the values that an earlier run wrote after `resume_step`.
    purge_step = None if resume_step is None else resume_step + 1
    # The writer's buffer, kept for two minutes by default, is lost when Ctrl-C ends the process.
    writer = SummaryWriter(**{"purge_step": purge_step, "flush_secs": 1, **arguments})
    text = yaml.safe_dump(dict(run_config), sort_keys=False)
    writer.add_text("config", "    " + text.replace("\n", "\n    "), resume_step or 0)

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, lambda failed: writer.close(), say)


class _PlainLogger(logging.LoggerAdapter[logging.Logger]):
    warning_once = logging.LoggerAdapter.warning


def _open_of_accelerate(
    name: str,
    arguments: Mapping[str, Any],
    output: Path,
    run_config: Mapping[str, Any],
    resume_step: int | None,
    say: Say,
) -> Tracker:
    """Send the metrics to a tracker of accelerate; `arguments` are for its class in `accelerate.tracking`."""
    from accelerate import tracking

    # accelerate's logger would create its process state, which changes the devices and threads of this rank.
    tracking.logger = _PlainLogger(logging.getLogger("accelerate.tracking"))
    project, run_name = "vectorlm", output.resolve().name
    defaults: dict[str, dict[str, Any]] = {
        "aim": {"run_name": run_name, "logging_dir": str(output)},
        "clearml": {"run_name": run_name, "project_name": project},
        "comet_ml": {"run_name": project},
        "dvclive": {"dir": str(output / "dvclive"), "resume": resume_step is not None},
        "mlflow": {"experiment_name": project, "run_name": run_name},
        "swanlab": {"run_name": project, "experiment_name": run_name},
    }
    tracker = tracking.LOGGER_TYPE_TO_CLASS[name](**{**defaults[name], **arguments})
    tracker.main_process_only = False
    tracker.start()
    # Some trackers drop lists.
    settings = {
        path: str(value) if isinstance(value, list | tuple) else value for path, value in flat(run_config)
    }
    tracker.store_init_configuration(settings)
    return Tracker(lambda values, step: tracker.log(values, step=step), lambda failed: tracker.finish(), say)


def _open_trackio(arguments: Mapping[str, Any], run_config: Mapping[str, Any], say: Say) -> Tracker:
    """Send the metrics to trackio, which stores them on this machine unless `arguments` name a Space or a server."""
    import trackio

    run = trackio.init(**arguments, config=dict(run_config))
    return Tracker(lambda values, step: run.log(values, step=step), lambda failed: trackio.finish(), say)


def open_wandb(
    settings: Mapping[str, Any],
    run_config: Mapping[str, Any],
    id_file: Path,
    resumes: bool = False,
    say: Say = print,
) -> Tracker:
    """Send the metrics to Weights & Biases; with ``mode: offline`` they stay in a local folder.

    Args:
        settings: Keyword arguments of ``wandb.init``: ``project``, ``name``, ``entity``, ``mode``, ``dir`` ….
        run_config: The resolved config, shown with the run.
        id_file: The file for the id of the run.
        resumes: Whether to continue the run in `id_file`; `settings` take precedence.
        say: The function that prints errors.
    """
    import wandb

    if resumes and id_file.exists():
        settings = {"id": id_file.read_text(), "resume": "allow", **settings}
    run = wandb.init(**settings, config=dict(run_config))
    id_file.write_text(run.id)
    # W&B ignores values of its own step if that has been higher, as before a run was killed and resumed.
    run.define_metric("*", step_metric="step")
    return Tracker(
        lambda values, step: run.log({**values, "step": step}),
        lambda failed: run.finish(exit_code=int(failed)),
        say,
    )
