"""How much staleness of its rollouts each algorithm tolerates. Run: python benchmarks/staleness.py

Every run makes as many optimizer steps on as many completions of Countdown, from the model of
configs/countdown_warmup.yaml, and samples them in rollouts of N mini-batches, each trained on once: with N = 1 all is
on policy, with more the last mini-batch is N - 1 optimizer steps old, as in Asynchronous RLHF (Noukhovitch et al. 2024,
arXiv:2410.18252). Accuracy is the share of 512 held-out questions that the trained weights answer right at
temperature 1. Writes results/staleness.json and docs/images/staleness.png.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from parts import Job, Study, gains, measure
from report import ROOT, mean_and_range, write_result

SEEDS, ROLLOUTS = (0, 1, 2), (1, 2, 4, 8, 16, 32)
NUM_UPDATES, COMPLETIONS, GROUP = 64, 128, 8
"""Optimizer steps of a run, completions of each, and of a question."""
SETTINGS: dict[str, Any] = {
    "rl.dynamic_sampling": False,
    "rl.show_every": 0,
    "rl.beta": 0.1,
    "rl.critic.lr": 1.0e-3,
    "rl.critic.warmup_steps": 0,
    "train_parameters.optimizer.lr": 3.0e-4,
    "train_parameters.sampler.sample_frequency": 1000,
    "train_parameters.sampler.engine.max_num_seqs": 512,
}
"""What differs from configs/countdown_grpo.yaml besides."""
CORRECTIONS = {
    "ppo": ("off",),
    "grpo": ("off", "tis"),
    "rloo": ("off", "bypass"),
    "proximal_rloo": ("off",),
    "best_of_k": ("off",),
    "online_dpo": ("off",),
}
"""Engine and trainer agree at the rollout, so weights like those of `tis` are 1: one algorithm has them, to show what
chance is. Only `bypass` weighs by the policy as it is now. Online DPO and best-of-k refuse every preset but `off`."""


def settings(job: Job) -> dict[str, Any]:
    """Return what a run sets."""
    group = 1 if job["algorithm"] == "ppo" else GROUP
    return {
        **SETTINGS,
        "rl.algorithm": job["algorithm"],
        "rl.correction.preset": job["correction"],
        "rl.group_size": group,
        "rl.prompts_per_step": job["n"] * COMPLETIONS // group,
        "rl.num_mini_batches": job["n"],
        "rl.max_steps": NUM_UPDATES // job["n"],
    }


STUDY = Study(ROOT / "runs/staleness", "countdown_grpo.yaml", settings)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", default=list(CORRECTIONS), choices=CORRECTIONS)
    parser.add_argument("--rollouts", nargs="+", type=int, default=ROLLOUTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    pairs = [
        (algorithm, correction) for algorithm in arguments.algorithms for correction in CORRECTIONS[algorithm]
    ]
    jobs = [
        {"algorithm": algorithm, "correction": correction, "n": n, "seed": seed}
        for seed in arguments.seeds
        for algorithm, correction in pairs
        for n in arguments.rollouts
    ]
    found = measure(STUDY, jobs, arguments.part)
    rows = [_row(algorithm, correction, found, arguments.rollouts) for algorithm, correction in pairs]
    setting = {
        "seeds": list(arguments.seeds),
        "updates": NUM_UPDATES,
        "completions": COMPLETIONS,
        "differs": SETTINGS,
    }
    write_result("staleness", setting, rows, {"runs": found})
    draw(found, ROOT / "docs/images/staleness.png")


def _row(algorithm: str, correction: str, found: list[dict[str, Any]], rollouts: list[int]) -> dict[str, Any]:
    row: dict[str, Any] = {"algorithm": algorithm, "correction": correction}
    for n in rollouts:
        points = gains(found, algorithm=algorithm, correction=correction, n=n)
        row[f"N = {n}"] = mean_and_range(points)
    return row


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the gain of each algorithm over N: the mean of its seeds, and each of them."""
    from matplotlib.figure import Figure

    algorithms = list(dict.fromkeys(run["algorithm"] for run in found))
    columns = min(3, len(algorithms))
    lines = -(-len(algorithms) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.7 * lines + 0.6), dpi=120, layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for panel, algorithm in zip(panels, algorithms, strict=False):
        rollouts = sorted({run["n"] for run in found if run["algorithm"] == algorithm})
        for correction, colour in zip(CORRECTIONS[algorithm], ("tab:gray", "tab:blue"), strict=False):
            points = [gains(found, algorithm=algorithm, correction=correction, n=n) for n in rollouts]
            panel.plot(
                rollouts, list(map(statistics.fmean, points)), color=colour, marker="_", label=correction
            )
            for n, each in zip(rollouts, points, strict=True):
                panel.scatter([n] * len(each), each, s=14, color=colour, alpha=0.45, linewidths=0)
        panel.set_title(algorithm, fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_xticks(rollouts, list(map(str, rollouts)))
        panel.axhline(0, color="black", lw=0.6)
        panel.grid(axis="y", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if len(CORRECTIONS[algorithm]) > 1:
            panel.legend(frameon=False, fontsize=8, loc="lower left")
    for panel in panels[len(algorithms) :]:
        panel.set_visible(False)
    figure.suptitle("Countdown: gain in right answers by mini-batches of a rollout", fontsize=11)
    figure.supxlabel("N, mini-batches of a rollout, each trained on once", fontsize=9)
    figure.supylabel("points of held-out accuracy; dots: seeds", fontsize=9)
    figure.savefig(path)


if __name__ == "__main__":
    main()
