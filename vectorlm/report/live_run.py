"""A run as its files tell it, read again as they grow."""

from __future__ import annotations

import os
from collections import deque
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from vectorlm.report.runs import START, parse_line, read_settings
from vectorlm.types import shown_prompt

NUM_LINES = 20_000
"""Lines of metrics that are kept; a longer run shows its last ones."""
NUM_SAMPLES = 256
NUM_RECENT = 30
"""Steps that speed and phases are means over."""
MOST_BYTES = 64 << 20
"""Of a file that is longer, what comes before is not read."""
SAMPLE_BYTES = 1 << 20
NOT_PHASES = ("step", "stall", "start")
"""The whole step, a part of the hot swap, and what happens once."""
BESIDE_STEP = ("evaluate", "held_out", "save")
"""Phases between two steps."""

Line = dict[str, Any]


class Sample(NamedTuple):
    """A completion of a training step."""

    step: int
    prompt: str
    completion: str
    reward: float | None


class GrowingFile:
    """The last lines of a JSONL file that a run appends to, or replaces when it resumes."""

    def __init__(self, path: Path, num_kept: int, most_bytes: int = MOST_BYTES) -> None:
        self.path, self.lines = path, deque[Line](maxlen=num_kept)
        self._most_bytes = most_bytes
        self._inode, self._offset, self._rest = 0, 0, b""

    def read(self) -> bool:
        """Read what is new, and return whether anything is; a line that is not whole yet waits for its end."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            had_any = bool(self.lines)
            self.lines.clear()
            self._inode = self._offset = 0
            return had_any
        with file:
            status = os.fstat(file.fileno())
            is_other = status.st_ino != self._inode or status.st_size < self._offset
            if is_other:
                self.lines.clear()
                self._inode, self._rest = status.st_ino, b""
                self._offset = max(0, status.st_size - self._most_bytes)
            file.seek(self._offset)
            data = file.read()
        is_cut = is_other and self._offset > 0
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        found = map(parse_line, whole[1:] if is_cut else whole)
        self.lines.extend(line for line in found if line is not None)
        return is_other or bool(data)


class LiveRun:
    """What is known of the run in a folder; `read` looks again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = GrowingFile(path / "metrics.jsonl", NUM_LINES)
        self._rollouts = GrowingFile(path / "rollouts.jsonl", NUM_SAMPLES, SAMPLE_BYTES)
        self._answers = GrowingFile(path / "samples.jsonl", NUM_SAMPLES, SAMPLE_BYTES)
        self.settings: dict[str, Any] = {}
        """The run's config, as plain values."""
        self.start: dict[str, Any] | None = None
        """What the run noted of its start, once its models were loaded."""

    def read(self) -> bool:
        """Read what is new, and return whether anything is."""
        before = self.settings, self.start
        self.settings = self._read_settings("config.yaml")
        self.start = self._read_settings(START) or None
        sampler = (self.settings.get("train_parameters") or {}).get("sampler") or {}
        if (named := sampler.get("output_jsonl_path")) and Path(named) != self._answers.path:
            self._answers = GrowingFile(Path(named), NUM_SAMPLES, SAMPLE_BYTES)
        has_news = [each.read() for each in (self._metrics, self._rollouts, self._answers)]
        return any(has_news) or before != (self.settings, self.start)

    @property
    def has_files(self) -> bool:
        """Whether this is the folder of a run that has begun."""
        return bool(self.settings) or self._metrics.path.exists()

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None where it has noted none."""
        noted = (self.start or {}).get("num_steps")
        return noted if noted is not None else (self.settings.get("rl") or {}).get("max_steps")

    @property
    def step(self) -> int | None:
        """The last step of which there are metrics."""
        return self._metrics.lines[-1].get("step") if self._metrics.lines else None

    @property
    def has_model(self) -> bool:
        """Whether the run has exported its model since it started."""
        try:
            written = (self.path / "final-model").stat().st_mtime
        except FileNotFoundError:
            return False
        return written >= (self.start or {}).get("started_at", 0.0)

    @property
    def written_at(self) -> float | None:
        """When metrics were written last, in seconds of the epoch."""
        return self._metrics.path.stat().st_mtime if self._metrics.lines else None

    def values(self, metric: str) -> list[float | None]:
        """Return the metric, step by step where there is one; None where it was not a finite number."""
        return [line[metric] for line in self._metrics.lines if metric in line]

    @property
    def step_s(self) -> float | None:
        """Mean seconds from one of the last steps to the next, evaluations and checkpoints included."""
        steps = [(_step_s(line), _phases_of(line)) for line in self._recent()]
        took = [
            step_s + sum(phases.get(name, 0.0) for name in BESIDE_STEP) for step_s, phases in steps if step_s
        ]
        return sum(took) / len(took) if took else None

    def phases(self) -> dict[str, float]:
        """Return the share of the last steps' time by phase, the longest first."""
        seconds: dict[str, float] = {}
        for line in self._recent():
            for name, value in _phases_of(line).items():
                seconds[name] = seconds.get(name, 0.0) + value
        total = sum(seconds.values())
        longest_first = sorted(seconds.items(), key=lambda item: -item[1])
        return {name: value / total for name, value in longest_first if value}

    def samples(self) -> list[Sample]:
        """Return the completions of the newest step, of each group one first; those of evaluations without rollouts."""
        if self._rollouts.lines:
            newest = _newest(self._rollouts)
            first_of = {line.get("group"): line for line in reversed(newest)}
            firsts = [line for line in newest if first_of[line.get("group")] is line]
            rest = [line for line in newest if first_of[line.get("group")] is not line]
            return [_sample(line, line.get("completion"), line.get("reward")) for line in firsts + rest]
        return [
            _sample(line, option, reward)
            for line in _newest(self._answers)
            for option, reward in zip_longest(line.get("options", ()), line.get("rewards", ()))
        ]

    def _recent(self) -> list[Line]:
        return list(self._metrics.lines)[-NUM_RECENT:]

    def _read_settings(self, name: str) -> dict[str, Any]:
        """Read a YAML or JSON file, unless it has not changed; empty where there is none, or half of one."""
        path = self.path / name
        try:
            return _parsed(path, path.stat().st_mtime_ns)
        except FileNotFoundError:
            return {}


@lru_cache(maxsize=4)
def _parsed(path: Path, written_ns: int) -> dict[str, Any]:
    """Return what a file held when it was written at `written_ns`."""
    return read_settings(path)


def _step_s(line: Line) -> float:
    return line.get("time/step_s") or line.get("train/step_s") or 0.0


def _phases_of(line: Line) -> dict[str, float]:
    """Return the seconds of a step by phase; the whole step where it has none."""
    times = {name[5:-2]: value or 0.0 for name, value in line.items() if name.startswith("time/")}
    phases = {name: value for name, value in times.items() if name not in NOT_PHASES}
    if not phases.keys() - BESIDE_STEP:
        phases["step"] = _step_s(line)
    if "evaluate" not in phases and "sampler/generate_s" in line:
        phases["evaluate"] = (line["sampler/generate_s"] or 0.0) + (line.get("weights/update_s") or 0.0)
    return phases


def _newest(file: GrowingFile) -> list[Line]:
    """Return the lines of the newest step."""
    last = file.lines[-1].get("train_step") if file.lines else None
    return [line for line in file.lines if line.get("train_step") == last]


def _sample(line: Line, completion: Any, reward: float | None) -> Sample:
    return Sample(line.get("train_step", 0), shown_prompt(line.get("prompt", "")), str(completion), reward)
