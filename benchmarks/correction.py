"""What each correction is worth on Countdown when the engine is not the policy. Run: python benchmarks/correction.py

GRPO on one rank from the model of configs/countdown_warmup.yaml, with rollouts sampled by weights that are stale,
disturbed, in bf16, or reused for many optimizer steps, on the same seeds for every correction.
Accuracy is the share of 512 held-out questions that the trained weights answer right at temperature 1. All runs share
one engine per precision. Writes results/correction.json and docs/images/correction.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mismatch import MismatchedEngine
from report import ROOT, circumstances, write_result

SEEDS, NUM_PARTS = (0, 1, 2), 2
FOLDER = ROOT / "runs" / "correction"
SETTINGS: dict[str, Any] = {
    "rl.max_steps": 40,
    "rl.prompts_per_step": 32,
    "rl.num_mini_batches": 2,
    "rl.dynamic_sampling": False,
    "rl.show_every": 0,
    "train_parameters.optimizer.lr": 3.0e-4,
    "train_parameters.sampler.sample_frequency": 1000,
    "train_parameters.sampler.engine.max_num_seqs": 512,
}
"""What differs from configs/countdown_grpo.yaml."""
SOME = ("off", "tis")
EVERY = ("off", "tis", "icepop", "seq_mask_tis", "mis", "geometric", "decoupled")


@dataclass(frozen=True)
class Mismatch:
    """One way in which the engine is not the policy, and the corrections that meet it."""

    corrections: tuple[str, ...]
    staleness: int = 0
    noise: float = 0.0
    dtype: str = "float32"
    settings: dict[str, Any] = field(default_factory=dict)


def updates(count: int, algorithm: str = "grpo") -> dict[str, Any]:
    """Return the settings of so many optimizer steps per batch."""
    return {"rl.num_mini_batches": count, "rl.algorithm": algorithm}


MISMATCHES = {
    "none": Mismatch(SOME),
    "bf16": Mismatch(SOME, dtype="bfloat16"),
    "bf16, noise 0.3": Mismatch(EVERY, noise=0.3, dtype="bfloat16"),
    "stale by 2": Mismatch(EVERY, staleness=2),
    "stale by 4": Mismatch(SOME, staleness=4),
    "stale by 8": Mismatch(EVERY, staleness=8),
    "GRPO, 1 update": Mismatch(SOME, settings=updates(1)),
    "GRPO, 4 updates": Mismatch(SOME, settings=updates(4)),
    "GRPO, 16 updates": Mismatch(("off", "tis", "decoupled", "bypass"), settings=updates(16)),
    "RLOO, 16 updates": Mismatch(("off", "tis", "bypass"), settings=updates(16, "rloo")),
}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mismatches", nargs="+", default=list(MISMATCHES), choices=MISMATCHES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    pairs = [
        (name, correction) for name in arguments.mismatches for correction in MISMATCHES[name].corrections
    ]
    jobs = [
        {"mismatch": mismatch, "correction": correction, "seed": seed}
        for seed in arguments.seeds
        for mismatch, correction in pairs
    ]
    if arguments.part is not None:
        run_part(jobs[arguments.part :: NUM_PARTS], FOLDER / str(arguments.part))
        return
    found = measure(jobs)
    rows = [_row(mismatch, correction, found) for mismatch, correction in pairs]
    setting = {"seeds": list(arguments.seeds), "differs": SETTINGS}
    write_result("correction", setting, rows, {"runs": found})
    draw(found, ROOT / "docs/images/correction.png")


def measure(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Share the runs out over two processes of one thread each, and return what they found.

    What an interrupted call of the same commit has found already is not measured again.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *sys.argv]
    parts = [
        subprocess.Popen([*command, "--part", str(part)], cwd=ROOT, env=environment)
        for part in range(NUM_PARTS)
    ]
    if any([part.wait() for part in parts]):
        sys.exit("a part failed: see above")
    found = [run for part in range(NUM_PARTS) for run in _read(FOLDER / str(part))]
    places = {_key(job): place for place, job in enumerate(jobs)}
    return sorted((run for run in found if _key(run) in places), key=lambda run: places[_key(run)])


def _read(folder: Path) -> list[dict[str, Any]]:
    """Return what was found at this commit."""
    path, commit = folder / "found.jsonl", circumstances()["commit"]
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [run for run in runs if run.pop("commit") == commit]


def _key(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["mismatch"], run["correction"], run["seed"]


def run_part(jobs: list[dict[str, Any]], folder: Path) -> None:
    """Train every job, one after the other, and add a line for each to ``found.jsonl`` in `folder`."""
    import torch

    import vectorlm.reinforce
    from vectorlm.config import load_config
    from vectorlm.ranks.topology import Topology

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    done, commit = {_key(run) for run in _read(folder)}, circumstances()["commit"]
    topology, open_engine = Topology.from_environment(), vectorlm.reinforce.open_engine
    with ExitStack() as engines, (folder / "found.jsonl").open("a") as lines:
        shared: dict[str, Any] = {}
        for job in jobs:
            if _key(job) in done:
                continue
            mismatch = MISMATCHES[job["mismatch"]]
            output = folder / "_".join(map(str, job.values())).replace(" ", "")
            settings = {
                **SETTINGS,
                **mismatch.settings,
                "rl.correction.preset": job["correction"],
                "train_parameters.seed": job["seed"],
                "train_parameters.output_dir": str(output),
                "train_parameters.sampler.vllm_dtype": mismatch.dtype,
            }
            overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
            config = load_config(ROOT / "configs/countdown_grpo.yaml", overrides)
            if mismatch.dtype not in shared:
                # One engine for all runs of a precision: starting one takes longer than some runs.
                longest = config.train_parameters.max_seq_len
                shared[mismatch.dtype] = open_engine(
                    config, topology, engines, logprobs_mode="processed_logprobs", max_model_len=longest
                )
            engine = partial(_mismatched, shared[mismatch.dtype], mismatch, job["seed"])
            vectorlm.reinforce.open_engine = engine
            vectorlm.reinforce.reinforce(config, topology)
            metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
            lines.write(json.dumps(job | _summary(metrics) | {"commit": commit}) + "\n")
            lines.flush()


def _mismatched(engine: Any, mismatch: Mismatch, seed: int, *arguments: Any, **more: Any) -> MismatchedEngine:
    """Stand in for `open_engine`, whose arguments are not needed any more."""
    return MismatchedEngine(engine, staleness=mismatch.staleness, noise=mismatch.noise, seed=seed)


def _summary(metrics: list[dict[str, float]]) -> dict[str, Any]:
    """Return what is kept of a run; the mean of a metric is over the steps that have it, None where none has."""
    steps = metrics[1:]
    exams = [line["eval/accuracy"] for line in metrics if "eval/accuracy" in line]

    def mean(name: str) -> float | None:
        values = [line[name] for line in steps if name in line]
        return statistics.fmean(values) if values else None

    return {
        "before": exams[0],
        "after": exams[-1],
        "ess": mean("correction/ess"),
        "ess_sequences": mean("correction/ess_sequences"),
        "gap": mean("sampler/logprob_gap_mean"),
        "rejected": mean("correction/rejected_tokens"),
        "reward": [line["reward/mean"] for line in steps],
    }


def _row(mismatch: str, correction: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    runs = [run for run in found if run["mismatch"] == mismatch and run["correction"] == correction]
    gains = [100 * (run["after"] - run["before"]) for run in runs]
    return {
        "engine": mismatch,
        "correction": correction,
        "seeds": len(runs),
        "gain, points": f"{statistics.fmean(gains):.1f} ({min(gains):.1f} to {max(gains):.1f})",
        "ESS of tokens": _mean(runs, "ess"),
        "ESS of completions": _mean(runs, "ess_sequences"),
        "gap of log-probabilities": _mean(runs, "gap", digits=4),
        "rejected tokens, %": _mean(runs, "rejected", scale=100, digits=1),
    }


def _mean(runs: list[dict[str, Any]], name: str, scale: float = 1.0, digits: int = 3) -> str:
    values = [scale * run[name] for run in runs if run[name] is not None]
    return f"{statistics.fmean(values):.{digits}f}" if values else ""


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the gain of each correction under each mismatch: the mean of its seeds, and each of them."""
    from matplotlib.figure import Figure

    mismatches = list(dict.fromkeys(run["mismatch"] for run in found))
    corrections = list(dict.fromkeys(run["correction"] for run in found))
    columns = min(4, len(mismatches))
    rows = -(-len(mismatches) // columns)
    figure = Figure(figsize=(3.0 * columns, 2.6 * rows + 0.6), dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for panel, mismatch in zip(panels, mismatches, strict=False):
        for place, correction in enumerate(reversed(corrections)):
            gains = [
                100 * (run["after"] - run["before"])
                for run in found
                if run["mismatch"] == mismatch and run["correction"] == correction
            ]
            if not gains:
                continue
            colour = "tab:gray" if correction == "off" else "tab:blue"
            panel.scatter(gains, [place] * len(gains), s=14, color=colour, alpha=0.45, linewidths=0)
            panel.plot([statistics.fmean(gains)] * 2, [place - 0.32, place + 0.32], color=colour, lw=2.5)
        panel.set_title(mismatch, fontsize=10)
        panel.set_yticks(range(len(corrections)), reversed(corrections))
        panel.axvline(0, color="black", lw=0.6)
        panel.grid(axis="x", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(mismatches) :]:
        panel.set_visible(False)
    figure.suptitle("Countdown: gain in right answers where the engine is not the policy", fontsize=11)
    figure.supxlabel("points of held-out accuracy; dots: seeds, bars: their mean", fontsize=9)
    figure.savefig(path)


if __name__ == "__main__":
    main()
