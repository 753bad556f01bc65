"""How far every algorithm comes on Countdown with the same settings. Run: python benchmarks/choosing.py

Each run makes 40 steps of 32 questions with 8 completions each, two optimizer steps a step, from the model of
configs/countdown_warmup.yaml: the config of countdown_grpo.yaml without dynamic sampling, one learning rate for all,
and each algorithm's own defaults. Accuracy is the share of 512 held-out questions answered right at temperature 1.
Writes results/choosing.json and docs/images/choosing.png.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from parts import Job, Study, gains, measure
from report import ROOT, mean_and_range, write_result

from vectorlm.algorithms.registry import algorithm_names, get_algorithm

SEEDS, NUM_STEPS, EVERY = (0, 1, 2), 40, 10
SETTINGS: dict[str, Any] = {
    "rl.max_steps": NUM_STEPS,
    "rl.prompts_per_step": 32,
    "rl.show_every": 0,
    "evaluation.every": EVERY,
    "engine.max_num_seqs": 512,
}
"""What differs from configs/countdown_grpo.yaml besides the algorithm."""
CRITIC = {"rl.critic.lr": 1.0e-3, "rl.critic.warmup_steps": 0}


def settings(job: Job) -> dict[str, Any]:
    """Return what a run sets."""
    return {
        **SETTINGS,
        **(CRITIC if get_algorithm(job["algorithm"]).needs_critic else {}),
        "rl.algorithm": job["algorithm"],
        # Else a step of one algorithm would have more completions than another's.
        "rl.algorithm.dynamic_sampling": False,
    }


STUDY = Study(ROOT / "runs/choosing", "countdown_grpo.yaml", settings)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    # Distillation needs a larger model: benchmarks/distill.py.
    names = [name for name in algorithm_names() if not get_algorithm(name).needs_teacher]
    parser.add_argument("--algorithms", nargs="+", default=names, choices=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jobs = [
        {"algorithm": algorithm, "seed": seed}
        for seed in arguments.seeds
        for algorithm in arguments.algorithms
    ]
    found = measure(STUDY, jobs, arguments.part)
    rows = []
    for algorithm in arguments.algorithms:
        curves = [run["curve"] for run in found if run["algorithm"] == algorithm]
        by_step = {f"step {points[0][0]}, %": _percents(points) for points in zip(*curves, strict=True)}
        gained = mean_and_range(gains(found, algorithm=algorithm))
        rows.append({"algorithm": algorithm, **by_step, "gain, points": gained})
    rows.sort(key=lambda row: -statistics.fmean(gains(found, algorithm=row["algorithm"])))
    write_result("choosing", {"seeds": list(arguments.seeds), "differs": SETTINGS}, rows, {"runs": found})
    draw(rows, found, ROOT / "docs/images/choosing.png")


def _percents(points: Any) -> str:
    return f"{100 * statistics.fmean(accuracy for _, accuracy in points):.1f}"


def draw(rows: list[dict[str, Any]], found: list[dict[str, Any]], path: Path) -> None:
    """Draw the curve of every algorithm in a panel of its own, over all the others'."""
    from matplotlib.figure import Figure

    columns = 7
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(1.75 * columns, 1.6 * lines + 0.7), dpi=110, layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    means = {}
    for row in rows:
        curves = [run["curve"] for run in found if run["algorithm"] == row["algorithm"]]
        means[row["algorithm"]] = [
            (points[0][0], 100 * statistics.fmean(each for _, each in points))
            for points in zip(*curves, strict=True)
        ]
    for panel, (name, mean) in zip(panels, means.items(), strict=False):
        for other in means.values():
            panel.plot(*zip(*other, strict=True), color="lightgray", lw=0.7)
        for run in found:
            if run["algorithm"] == name:
                panel.plot(
                    *zip(*[(step, 100 * each) for step, each in run["curve"]], strict=True),
                    color="tab:blue",
                    lw=0.5,
                    alpha=0.6,
                )
        panel.plot(*zip(*mean, strict=True), color="tab:blue", lw=2)
        panel.set_title(name, fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=7)
    for panel in panels[len(means) :]:
        panel.set_visible(False)
    num_seeds = len({run["seed"] for run in found})
    blue = "the only seed" if num_seeds == 1 else f"mean and {num_seeds} seeds"
    figure.suptitle(
        f"Countdown, every algorithm with the same settings: blue its run ({blue}), gray the others"
    )
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("% of held-out questions right", fontsize=9)
    figure.savefig(path)


if __name__ == "__main__":
    main()
