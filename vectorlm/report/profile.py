"""The profile of a run: what rank 0 did in a few steps, and how long each phase took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vectorlm.report.phases import PHASES, PhaseTimes

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
