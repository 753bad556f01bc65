"""Make many short Countdown runs in parallel processes, with one thread and one engine per precision in a process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from found import add_found, read_found
from report import ROOT

Job = dict[str, Any]
"""Names and values that identify a run, its seed included."""


@dataclass(frozen=True)
class Study:
    """Settings for the runs of a benchmark; a run trains on one rank."""

    folder: Path
    """Folder for the outputs and results of all runs."""
    config: str
    """Name of the file in configs/ that all runs use."""
    settings: Callable[[Job], dict[str, Any]]
    """Returns the settings of a run, besides its seed and output folder."""
    engine: Callable[[Any, Job], Any] = lambda engine, job: engine
    """Returns the engine for a run, which may wrap the shared engine."""
    after: Callable[[Any, Any], dict[str, Any]] = lambda engine, config: {}
    """Returns more measurements of a finished run, whose weights the engine holds."""
    num_parts: int = 2
    """Number of processes that share the runs."""

    def config_of(self, job: Job, **train_parameters: Any) -> Any:
        """Return the config of a run, with these further settings of ``train_parameters``."""
        from vectorlm.runs.config.load import load_config

        more = {f"train_parameters.{name}": value for name, value in train_parameters.items()}
        overrides = [f"{name}={json.dumps(value)}" for name, value in (self.settings(job) | more).items()]
        return load_config(ROOT / "configs" / self.config, overrides)


def run_program(*command: str) -> None:
    """Print this command line of Python and run it in the repository; its output goes to standard error."""
    print("$ python " + " ".join(command), flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=sys.stderr)


def prepare(*names: str) -> None:
    """Make the data of Countdown, and train the models of these files in configs/, unless they exist."""
    if not (ROOT / "data/countdown/student").exists():
        run_program("examples/make_countdown.py", "--output_dir", "data/countdown", "--seed", "0")
    for name in names:
        if not (ROOT / f"runs/{name}/final-model").exists():
            run_program(
                "examples/llama_example_mp.py", "--yaml_path", f"configs/{name}.yaml", "--world_size", "2"
            )


def measure(study: Study, jobs: Sequence[Job], part: int | None, *more: str) -> list[dict[str, Any]]:
    """Return the results of all runs, in order; results that an earlier call stored at this commit are reused.

    Args:
        study: Settings for the runs.
        jobs: The runs.
        part: Number of this part, from ``--part``; the process exits here. None in the main process, which starts the
            program again for every part.
        *more: Arguments for the parts, besides the arguments of the main process.
    """
    if part is not None:
        _run_part(study, jobs[part :: study.num_parts], study.folder / str(part))
        sys.exit()
    prepare("countdown_warmup")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *sys.argv, *more]
    parts = [
        subprocess.Popen([*command, "--part", str(number)], cwd=ROOT, env=environment)
        for number in range(study.num_parts)
    ]
    if any([process.wait() for process in parts]):
        sys.exit("a part failed: see above")
    return found_before(study, jobs)


def found_before(study: Study, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return the stored results of these runs, in order."""
    found = [run for number in range(study.num_parts) for run in read_found(study.folder / str(number))]
    return [run for job in jobs for run in found if is_run(run, job)]


def gains(found: Sequence[dict[str, Any]], **known: Any) -> list[float]:
    """Return the gain in accuracy, in points, of every run with these names and values."""
    return [100 * (run["after"] - run["before"]) for run in found if is_run(run, known)]


def _run_part(study: Study, jobs: Sequence[Job], folder: Path) -> None:
    """Make the runs, one after the other."""
    import torch

    from vectorlm.ranks.topology import Topology
    from vectorlm.runs.reinforcement import reinforce
    from vectorlm.runs.start import open_engine

    torch.set_num_threads(1)
    done, topology = read_found(folder), Topology.from_environment()
    with ExitStack() as engines:
        shared: dict[tuple[str, str | None], Any] = {}
        for job in jobs:
            if any(is_run(run, job) for run in done):
                continue
            output = folder / "_".join(map(str, job.values())).replace(" ", "")
            config = study.config_of(job, seed=job["seed"], output_dir=str(output))
            dtype = config.engine.dtype, config.engine.quantization
            if dtype not in shared:
                # One engine for all runs of a precision: starting one takes longer than some runs.
                shared[dtype] = open_engine(config, topology, engines)
            reinforce(config, topology, study.engine(shared[dtype], job))
            after = study.after(shared[dtype], config)
            metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
            add_found(folder, job | _summary(metrics) | after)


def is_run(run: dict[str, Any], job: Job) -> bool:
    """Return whether the run has all names and values of `job`."""
    return all(run[name] == value for name, value in job.items())


def _summary(metrics: list[dict[str, float]]) -> dict[str, Any]:
    """Summarise the metrics of a run. A mean is over the steps that have the metric, and None if no step has it."""
    steps = metrics[1:]
    evaluations = [line["eval/accuracy"] for line in metrics if "eval/accuracy" in line]

    def mean(name: str) -> float | None:
        values = [line[name] for line in steps if name in line]
        return statistics.fmean(values) if values else None

    return {
        "before": evaluations[0],
        "after": evaluations[-1],
        "ess": mean("correction/ess"),
        "ess_sequences": mean("correction/ess_sequences"),
        "gap": mean("sampler/logprob_gap_mean"),
        "rejected": mean("correction/rejected_tokens"),
        "kl": mean("policy/kl"),
        "tokens": sum(line.get("perf/trained_tokens", 0.0) for line in steps),
        "teacher_kl": _mean_of_last(steps, "teacher/kl"),
        "reward": [line["reward/mean"] for line in steps],
        "curve": [(line["step"], line["eval/accuracy"]) for line in metrics if "eval/accuracy" in line],
    }


def _mean_of_last(steps: list[dict[str, float]], name: str, count: int = 10) -> float | None:
    values = [line[name] for line in steps[-count:] if name in line]
    return statistics.fmean(values) if values else None
