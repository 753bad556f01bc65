"""Qualify a GPU machine: run each step in its own process, and compare its figures with the expected ones.

    make gpu                                            every step that the machine has enough devices for
    python benchmarks/gpu/qualify.py --only swap,sleep  some steps; benchmarks/results/gpu.json keeps the other rows
    python benchmarks/gpu/qualify.py --plan             print requirements and expected figures; start nothing
    python benchmarks/gpu/qualify.py --device cpu       rehearse with tiny models on CPU; save nothing

The steps run offline. docs/dev/gpu.md derives the expected figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path += [str(ROOT / name) for name in ("benchmarks", "tests", "tests/sampling")]

import yaml  # noqa: E402
from report import RESULTS, write_result  # noqa: E402

FREED_WITHIN_S = 10.0
TAIL_LINES = 25
GOOD = ("ok", "noted")
REHEARSAL_FACTOR = 3
"""Factor on the time limits in a rehearsal, where they only end a step that hangs. A machine with two slow cores takes
45 s to start an engine, and `kills` starts two. Its figures count from the kill."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The expectation for one figure of a step, from steps.yaml."""

    figure: str
    at_least: float | None = None
    at_most: float | None = None
    predicted: Any = None
    gpu: str | None = None
    """Name of the only GPU that the bounds are for; None for bounds on all machines."""
    means: str = ""
    cuda_only: bool = False

    @property
    def text(self) -> str:
        """The bounds or the prediction, as a short text."""
        if self.predicted == "-":
            return "-"
        parts = {">=": self.at_least, "<=": self.at_most, "predicted": self.predicted}
        text = ", ".join(f"{word} {value}" for word, value in parts.items() if value is not None) or "yes"
        return text if self.gpu is None else f"on an {self.gpu}: {text}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A qualification step from steps.yaml."""

    name: str
    what: str = ""
    call: str
    limit_s: float
    min_gpus: int = 1
    expected: tuple[Expected, ...] = ()
    runner: int | None = None
    """The version of vLLM's model runner on CUDA, 1 or 2; None for vLLM's default."""


def read_steps() -> tuple[Step, ...]:
    """Return the steps of steps.yaml; a step with `both_runners` becomes two."""
    steps = yaml.safe_load(Path(__file__).with_name("steps.yaml").read_text())
    found = []
    for name, fields in steps.items():
        figures = fields.pop("figures")
        fields["expected"] = tuple(Expected(figure=figure, **figures[figure]) for figure in figures)
        runners = (2, 1) if fields.pop("both_runners", False) else (None,)
        found += [
            Step(name=f"{name}_v1" if runner == 1 else name, runner=runner, **fields) for runner in runners
        ]
    return tuple(found)


STEPS = read_steps()
LEFT = Expected(figure="left in use on a device, MiB", at_most=64, means="nvidia-smi: which process holds it")


def main() -> int:
    """Run the steps; return 1 if a figure is not as expected."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names of steps, with commas between them")
    parser.add_argument("--plan", action="store_true", help="start nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name in ("--call", "--folder", "--memory_gib"):  # Arguments of a step's own process.
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    is_cuda = arguments.device == "cuda"
    if arguments.call:
        call(arguments.call, is_cuda, float(arguments.memory_gib), Path(arguments.folder))
        return 0
    names = [step.name for step in STEPS]
    chosen = arguments.only.split(",") if arguments.only else names
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"no step is called {', '.join(unknown)}: the steps are {', '.join(names)}.")
    steps = [step for step in STEPS if step.name in chosen]
    if arguments.plan:
        print(plan(steps))
        return 0
    devices = gpus() if is_cuda else []
    if is_cuda and not devices:
        parser.error("nvidia-smi lists no GPU. Rehearse with --device cpu, or read --plan.")
    # SIGTERM must end the step as Ctrl-C does; otherwise it continues in its own session.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    rows = [row for step in steps for row in rows_of(step, is_cuda, devices)]
    if is_cuda and rows:
        save(rows, devices)
    bad = sorted({row["step"] for row in rows if row["verdict"] not in GOOD})
    print(f"not as expected: {', '.join(bad)}" if bad else "all as expected")
    return bool(bad)


def call(name: str, is_cuda: bool, memory_gib: float, folder: Path) -> None:
    """Run one step in this process."""
    import torch
    from gpu_bench import Bench

    if torch.cuda.is_available() != is_cuda:
        found = "no CUDA device (docs/gpu.md)" if is_cuda else "a CUDA device: rehearse elsewhere"
        sys.exit(f"torch {torch.__version__} finds {found}.")
    module, _, function = name.partition(":")
    getattr(import_module(module), function)(Bench(is_cuda, memory_gib, folder))


def plan(steps: Sequence[Step]) -> str:
    """Return the requirements and expected figures of each step, as a text."""
    lines = []
    for step in steps:
        runner = f", model runner V{step.runner}" if step.runner else ""
        lines.append(f"{step.name}: {step.what} ({step.min_gpus} GPU, at most {step.limit_s:g} s{runner})")
        lines += [f"    {expectation.figure}: {expectation.text}" for expectation in step.expected]
    one = sum(step.limit_s for step in steps if step.min_gpus == 1)
    return "\n".join([*lines, f"on one GPU: at most {one / 60:.1f} minutes"])


def rows_of(step: Step, is_cuda: bool, devices: Sequence[Gpu]) -> Iterator[dict[str, str]]:
    """Run a step, yield and print its rows, and explain rows that are not as expected."""
    # Any machine has enough cores for two ranks.
    if step.min_gpus > (len(devices) if is_cuda else 2):
        print(f"== {step.name}: left out, needs {step.min_gpus} GPUs", flush=True)
        return
    if step.runner == 1 and not is_cuda:
        print(
            f"== {step.name}: left out, the step above has run on V1, because the CPU has no V2", flush=True
        )
        return
    print(f"== {step.name}: {step.what}", flush=True)
    before = gpus() if is_cuda else []
    figures, problem, output = run_step(
        step, is_cuda, min((gpu.total_mib for gpu in devices), default=0) / 1024
    )
    expected = [expectation for expectation in step.expected if is_cuda or not expectation.cuda_only]
    if is_cuda:
        expected.append(LEFT)
        figures[LEFT.figure] = left_mib(before)
    judged = [(expectation, figures.pop(expectation.figure, None)) for expectation in expected]
    judged += [(Expected(figure=figure, predicted="-"), value) for figure, value in figures.items()]
    if problem:
        judged.append((Expected(figure="exit code", at_most=0, means=f"its last output:\n{output}"), problem))
    for expectation, value in judged:
        value_text = f"{value:.4g}" if isinstance(value, float) else str(value)
        word = verdict(expectation, value, [gpu.name for gpu in devices])
        print(f"   {expectation.figure}: {value_text} (expected: {expectation.text}) {word}", flush=True)
        if word not in GOOD:
            print(f"     look at: {expectation.means}", flush=True)
        row = {
            "step": step.name,
            "figure": expectation.figure,
            "value": value_text,
            "expected": expectation.text,
        }
        yield row | {"verdict": word}


def verdict(expected: Expected, value: Any, gpu_names: Sequence[str] = ()) -> str:
    """Compare one figure of a machine with these GPUs with its expectation, and return the verdict."""
    if value is None:
        return "missing"
    bounds = expected.at_least, expected.at_most
    is_bounded = expected.gpu is None or {expected.gpu} == {*gpu_names}
    if bounds == (None, None) or not is_bounded:
        return "wrong" if value is False else "ok" if value is True else "noted"
    if isinstance(value, str):
        return "wrong"
    low, high = (bound if bound is not None else value for bound in bounds)
    return "ok" if low <= value <= high else "out of bounds"  # A NaN is out of bounds.


def run_step(step: Step, is_cuda: bool, memory_gib: float) -> tuple[dict[str, Any], str, str]:
    """Run a step in its own session, and kill its processes when it ends or exceeds its time limit.

    Returns:
        The figures; the exit code if it is not 0, or a note about the time limit; the last lines of the output.
    """
    limit_s = step.limit_s * (1 if is_cuda else REHEARSAL_FACTOR)
    chosen = {"VLLM_USE_V2_MODEL_RUNNER": str(step.runner - 1)} if is_cuda and step.runner else {}
    words = ["--call", step.call, "--device", "cuda" if is_cuda else "cpu", "--memory_gib", str(memory_gib)]
    with tempfile.TemporaryDirectory(prefix="vectorlm-gpu-", ignore_cleanup_errors=True) as name:
        folder, problem = Path(name), ""
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, *words, "--folder", name],
                cwd=ROOT,
                env={**os.environ, **chosen},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if code := process.wait(limit_s):
                problem = str(code)
        except subprocess.TimeoutExpired:
            problem = f"none within {limit_s:g} s"
        finally:
            # The ranks belong to this process group, and a sampler ends with its rank.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        noted = folder / "figures.jsonl"
        figures = dict(map(json.loads, noted.read_text().splitlines())) if noted.exists() else {}
        return figures, problem, "\n".join((folder / "output").read_text().splitlines()[-TAIL_LINES:])


class Gpu(NamedTuple):
    """A device in the output of nvidia-smi, which needs no CUDA context in this process."""

    name: str
    driver: str
    total_mib: int
    used_mib: int


def gpus() -> list[Gpu]:
    """Return the devices of this machine; an empty list if nvidia-smi is missing or fails."""
    query = "--query-gpu=name,driver_version,memory.total,memory.used"
    try:
        words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    fields = [line.split(", ") for line in lines]
    # nvidia-smi prints [N/A] for a device that shares the host's memory.
    return [Gpu(*cells[:2], *(int(mib) if mib.isdigit() else 0 for mib in cells[2:])) for cells in fields]


def left_mib(before: Sequence[Gpu]) -> int:
    """Return the largest growth of a device's used memory, in MiB, after the driver has had time to free it."""
    deadline = time.monotonic() + FREED_WITHIN_S
    while True:
        left = max(now.used_mib - then.used_mib for now, then in zip(gpus(), before, strict=True))
        if left <= (LEFT.at_most or 0) or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def save(rows: list[dict[str, Any]], devices: Sequence[Gpu]) -> None:
    """Write benchmarks/results/gpu.json, and keep the old rows of steps that did not run now."""
    path, ran = RESULTS / "gpu.json", {row["step"] for row in rows}
    if path.exists():
        rows = rows + [row for row in json.loads(path.read_text())["rows"] if row["step"] not in ran]
    place = {step.name: index for index, step in enumerate(STEPS)}
    rows.sort(key=lambda row: place.get(row["step"], len(place)))
    setting = {"devices": [gpu.name for gpu in devices], "driver": devices[0].driver, "ran now": sorted(ran)}
    try:
        write_result("gpu", setting, rows)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{path} was not written: {error}. It would have held:\n{json.dumps([setting, *rows])}")


if __name__ == "__main__":
    sys.exit(main())
