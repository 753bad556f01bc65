"""Measure each correction on Countdown when the engine differs from the policy. Run: python benchmarks/correction.py

GRPO trains the model of configs/countdown_warmup.yaml on one rank. The engine's weights are stale, disturbed, in bf16,
in 8 bits or rounded to 4 bits, or the rollouts are reused for many optimizer steps. All corrections use the same seeds.
Accuracy is the share of 512 held-out questions that the trained weights answer right at temperature 1. Each process
has one engine per precision for all its runs. Writes results/correction.json and docs/images/correction.png.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mismatch import MismatchedEngine
from parts import Job, Study, gains, measure
from report import ROOT, mean_and_range, write_result

SEEDS = (0, 1, 2)
SETTINGS: dict[str, Any] = {
    "rl.max_steps": 40,
    "rl.prompts_per_step": 32,
    "rl.num_mini_batches": 2,
    "rl.algorithm.dynamic_sampling": False,
    "rl.show_every": 0,
    "train_parameters.optimizer.lr": 3.0e-4,
    "evaluation.every": 1000,
    "engine.max_num_seqs": 512,
}
"""Settings that differ from configs/countdown_grpo.yaml."""
SOME = ("off", "tis")
EVERY = ("off", "tis", "icepop", "seq_mask_tis", "mis", "geometric", "decoupled")


@dataclass(frozen=True)
class Mismatch:
    """A mismatch between engine and policy, and the corrections that are tried for it."""

    corrections: tuple[str, ...]
    staleness: int = 0
    noise: float = 0.0
    dtype: str = "float32"
    quantization: str | None = None
    num_bits: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def updates(count: int, algorithm: str = "grpo") -> dict[str, Any]:
    """Return the settings for this number of optimizer steps per batch."""
    return {"rl.num_mini_batches": count, "rl.algorithm.name": algorithm}


MISMATCHES = {
    "none": Mismatch(SOME),
    "bf16": Mismatch(SOME, dtype="bfloat16"),
    "int8": Mismatch(SOME, dtype="bfloat16", quantization="int8"),
    "fp8": Mismatch(SOME, dtype="bfloat16", quantization="fp8_per_channel"),
    "4 bits": Mismatch(SOME, dtype="bfloat16", num_bits=4),
    "bf16, noise 0.3": Mismatch(EVERY, noise=0.3, dtype="bfloat16"),
    "stale by 2": Mismatch(EVERY, staleness=2),
    "stale by 4": Mismatch(SOME, staleness=4),
    "stale by 8": Mismatch(EVERY, staleness=8),
    "GRPO, 1 update": Mismatch(SOME, settings=updates(1)),
    "GRPO, 4 updates": Mismatch(SOME, settings=updates(4)),
    "GRPO, 16 updates": Mismatch(("off", "tis", "decoupled", "bypass"), settings=updates(16)),
    "RLOO, 16 updates": Mismatch(("off", "tis", "bypass"), settings=updates(16, "rloo")),
}


def settings(job: Job) -> dict[str, Any]:
    """Return the settings of a run."""
    mismatch = MISMATCHES[job["mismatch"]]
    return {
        **SETTINGS,
        **mismatch.settings,
        "rl.correction.preset": job["correction"],
        "engine.dtype": mismatch.dtype,
        "engine.quantization": mismatch.quantization,
    }


def disturbed(engine: Any, job: Job) -> MismatchedEngine:
    """Wrap the engine with the mismatch of a run."""
    mismatch = MISMATCHES[job["mismatch"]]
    return MismatchedEngine(
        engine,
        staleness=mismatch.staleness,
        noise=mismatch.noise,
        seed=job["seed"],
        num_bits=mismatch.num_bits,
    )


STUDY = Study(ROOT / "runs/correction", "countdown_grpo.yaml", settings, disturbed)


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
    found = measure(STUDY, jobs, arguments.part)
    rows = [_row(mismatch, correction, found) for mismatch, correction in pairs]
    setting = {"seeds": list(arguments.seeds), "differs": SETTINGS}
    write_result("correction", setting, rows, {"runs": found})
    draw(found, ROOT / "docs/images/correction.png")


def _row(mismatch: str, correction: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    runs = [run for run in found if run["mismatch"] == mismatch and run["correction"] == correction]
    return {
        "engine": mismatch,
        "correction": correction,
        "seeds": len(runs),
        "gain, points": mean_and_range(gains(runs)),
        "ESS of tokens": _mean(runs, "ess"),
        "ESS of completions": _mean(runs, "ess_sequences"),
        "gap of log-probabilities": _mean(runs, "gap", digits=4),
        "rejected tokens, %": _mean(runs, "rejected", scale=100, digits=1),
    }


def _mean(runs: list[dict[str, Any]], name: str, scale: float = 1.0, digits: int = 3) -> str:
    values = [scale * run[name] for run in runs if run[name] is not None]
    return f"{statistics.fmean(values):.{digits}f}" if values else ""


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the gain of each correction under each mismatch: every seed, and their mean."""
    from matplotlib.figure import Figure

    mismatches = list(dict.fromkeys(run["mismatch"] for run in found))
    columns = min(4, len(mismatches))
    rows = -(-len(mismatches) // columns)
    figure = Figure(figsize=(3.0 * columns, 2.6 * rows + 0.6), dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
    for panel, mismatch in zip(panels, mismatches, strict=False):
        tried = list(dict.fromkeys(run["correction"] for run in found if run["mismatch"] == mismatch))[::-1]
        for place, correction in enumerate(tried):
            points = gains(found, mismatch=mismatch, correction=correction)
            colour = "tab:gray" if correction == "off" else "tab:blue"
            panel.scatter(points, [place] * len(points), s=14, color=colour, alpha=0.45, linewidths=0)
            panel.plot([statistics.fmean(points)] * 2, [place - 0.32, place + 0.32], color=colour, lw=2.5)
        panel.set_title(mismatch, fontsize=10)
        panel.set_yticks(range(len(tried)), tried)
        panel.set_ylim(-0.6, len(tried) - 0.4)
        panel.tick_params(labelbottom=True)
        panel.axvline(0, color="black", lw=0.6)
        panel.grid(axis="x", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(mismatches) :]:
        panel.set_visible(False)
    figure.suptitle(
        "Gain in right answers on Countdown when the engine's probabilities differ from the trainer's",
        fontsize=11,
    )
    figure.supxlabel("percentage points of held-out accuracy (dots: seeds; bars: their mean)", fontsize=9)
    figure.savefig(path)


if __name__ == "__main__":
    main()
