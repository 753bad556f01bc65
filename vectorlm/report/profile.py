"""The profile of a run: what rank 0 did in a few steps, and how long each phase took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from vectorlm.train.recorder import Timer

WARMUP_STEPS = 2
"""The first steps allocate memory and compile kernels; the trace leaves them out."""
MAX_BYTES = 32 << 20
"""After this much no further step is recorded."""


def short_run(profile_steps: int, num_steps: int) -> tuple[str, str] | None:
    """Return why nothing is recorded in a run of `num_steps` steps, and what to do; None where something is."""
    if not profile_steps or num_steps > WARMUP_STEPS:
        return None
    rule = f"records nothing of {num_steps} steps: it leaves out the first {WARMUP_STEPS}"
    return rule, "Set it to 0, or train longer."


class ProfileSink:
    """Records a trace of some steps, and leaves the table of times in ``profile.txt``.

    A trace is ``trace-step-<n>.json.gz``, which chrome://tracing and ui.perfetto.dev open.
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
        """Record `num_traced` steps, the third after `initial_step` first; `timer` has what no line has taken yet."""
        self._folder, self._timer, self._say, self._clock = folder, timer, say, clock
        self._first = initial_step + WARMUP_STEPS
        self._last = self._first + num_traced
        self._times, self._num_steps = PhaseTimes(), 0
        # What was timed before counts too.
        self._began = clock() - sum(timer.seconds.values())
        self._profiler: Any = None
        self._num_bytes = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """End the recording of `step`, and begin that of the next where it is asked for."""
        self._times.add(values)
        self._num_steps += step > 0
        self._stop(step)
        if self._first <= step < self._last and self._num_bytes < MAX_BYTES:
            from torch.profiler import profile, supported_activities

            self._profiler = profile(activities=supported_activities())
            self._profiler.start()

    def _stop(self, step: int) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = self._folder / f"trace-step-{step}.json.gz"
        profiler.export_chrome_trace(str(path))
        self._num_bytes += path.stat().st_size
        self._say(f"profile: {path}")
        if self._num_bytes >= MAX_BYTES and step < self._last:
            self._say(f"profile: the traces have {self._num_bytes >> 20} MiB; later steps are not recorded")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._profiler is not None:
            self._profiler.stop()
        self._times.add(self._timer.drain())
        text = time_table(self._times, self._clock() - self._began, self._num_steps)
        (self._folder / "profile.txt").write_text(text + "\n", encoding="utf-8")
        self._say(text)


def time_table(times: PhaseTimes, whole_s: float, num_steps: int) -> str:
    """Return seconds, share and milliseconds a step of each phase, one a line."""
    lines = [f"{'time by phase':<18}{'s':>9}{'share':>7}{'ms/step':>10}"]
    for phase, seconds, share in [*times.rows(whole_s), ("all", whole_s, 1.0)]:
        meaning = PHASES[phase].meaning if phase in PHASES else ""
        milliseconds = 1e3 * seconds / max(num_steps, 1)
        lines.append(f"  {phase:<16}{seconds:>9.2f}{share:>7.0%}{milliseconds:>10.1f}  {meaning}".rstrip())
    return "\n".join(lines)


GREY = -1


class Phase(NamedTuple):
    """A phase, as pictures and tables name it."""

    meaning: str
    colour: int | None = None
    """Its place in `panels.COLOURS`, or `GREY`; None where timelines do not have it."""


PHASES = {
    "start": Phase("wait for the engine to load"),
    "forward": Phase("forward passes"),
    "backward": Phase("backward passes"),
    "optimizer": Phase("loss over ranks, gradient norm, optimizer step"),
    "held_out": Phase("loss on held-out text"),
    "publish": Phase("hot swap of the weights", 3),
    "sample": Phase("the engine computes", 0),
    "generate": Phase("wait for completions", GREY),
    "score": Phase("rewards", 1),
    "assess": Phase("forward passes of old policy, reference, critic, teacher", 6),
    "update": Phase("optimizer steps on the batch", 2),
    "evaluate": Phase("evaluation", 4),
    "evaluate/publish": Phase("evaluation: hot swap"),
    "evaluate/sample": Phase("evaluation: sampling"),
    "evaluate/score": Phase("evaluation: rewards, tasks of the harness, files"),
    "save": Phase("checkpoints", 5),
    "other": Phase("everything else: data, logging, export"),
}
"""In the order of a step. The engine measures `sample`, beside the others; the parts of `evaluate` add up to it."""


class PhaseTimes:
    """Adds up the seconds of each phase over the metrics of steps."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def add(self, values: Mapping[str, Any]) -> None:
        """Add what a line of metrics says."""
        found = {phase: values.get(f"time/{phase}_s") or 0.0 for phase in PHASES}
        if whole := found.pop("evaluate"):
            publish, sample = values.get("weights/update_s") or 0.0, values.get("sampler/generate_s") or 0.0
            found["evaluate/publish"], found["evaluate/sample"] = publish, sample
            found["evaluate/score"] = max(whole - publish - sample, 0.0)
        for phase, seconds in found.items():
            self._seconds[phase] += seconds

    def rows(self, whole_s: float | None = None) -> list[tuple[str, float, float]]:
        """Return the phases that took any time with their seconds and shares; with `whole_s` the rest as well."""
        found = {phase: seconds for phase, seconds in self._seconds.items() if seconds}
        total = sum(found.values())
        if whole_s is not None and whole_s > total:
            found["other"], total = whole_s - total, whole_s
        return [(phase, seconds, seconds / total) for phase, seconds in found.items()]
