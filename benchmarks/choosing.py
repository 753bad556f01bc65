"""Compare all algorithms on Countdown with the same settings. Run: python benchmarks/choosing.py

Each run starts from the model of configs/countdown_warmup.yaml. It makes 40 steps of 32 questions with 8 completions
each and two optimizer steps. The config is countdown_grpo.yaml without dynamic sampling: one learning rate for all
algorithms, otherwise their defaults. Accuracy is the share of 512 held-out questions answered right at temperature 1.
Writes results/choosing.json, and draws the questions that lead to an algorithm: docs/images/choosing.png.
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
"""Settings that differ from configs/countdown_grpo.yaml, besides the algorithm."""
CRITIC = {"rl.critic.lr": 1.0e-3, "rl.critic.warmup_steps": 0}


def settings(job: Job) -> dict[str, Any]:
    """Return the settings of a run."""
    return {
        **SETTINGS,
        **(CRITIC if get_algorithm(job["algorithm"]).needs_critic else {}),
        "rl.algorithm": job["algorithm"],
        # With it, the algorithms would sample different numbers of completions per step.
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
    draw(ROOT / "docs/images/choosing.png")


def _percents(points: Any) -> str:
    return f"{100 * statistics.fmean(accuracy for _, accuracy in points):.1f}"


QUESTIONS = (
    ("Does a larger model know the answers?", "on_policy_distillation", "or rl.teacher beside any of these"),
    (
        "Does a judge compare answers,\nwithout a score of its own?",
        "online_dpo",
        "or rloo, if it scores them",
    ),
    (
        "Does a group of answers to one question\ncost too much, or do rewards come during it?",
        "ppo",
        "with a critic",
    ),
    ("Are rollouts several steps old, or is it\na mixture of experts?", "gspo, cispo", "with a correction"),
    ("Are most groups all right or all wrong?", "dapo", "samples others in their place"),
)
"""Questions in the order to ask them, with the algorithm to use if the answer is yes, and a remark."""


def draw(path: Path) -> None:
    """Draw the questions that lead to an algorithm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 6.0), dpi=110)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, 8.4), ylim=(-5.5, 0.4))
    asked = {"boxstyle": "round,pad=0.55", "facecolor": "white", "edgecolor": "#4b5563"}
    chosen = {"boxstyle": "round,pad=0.5", "facecolor": "#dbeafe", "edgecolor": "#2563eb"}
    arrow = {"arrowstyle": "-|>", "color": "#4b5563", "lw": 1.3}
    left, right = 2.35, 5.35
    for row, (question, name, remark) in enumerate(QUESTIONS):
        y = -float(row)
        axes.annotate("", (right - 0.05, y), (left + 1.9, y), arrowprops=arrow)
        axes.text(right - 0.55, y + 0.09, "yes", fontsize=9, color="#4b5563")
        axes.annotate("", (left, y - 0.68), (left, y - 0.3), arrowprops=arrow)
        axes.text(left + 0.1, y - 0.57, "no", fontsize=9, color="#4b5563")
        axes.text(left, y, question, ha="center", va="center", fontsize=10.5, bbox=asked, zorder=3)
        axes.text(right + 0.1, y, name, va="center", fontsize=10.5, weight="bold", bbox=chosen, zorder=3)
        axes.text(right + 0.1, y - 0.36, remark, fontsize=9, color="#4b5563", va="center")
    last = -float(len(QUESTIONS)) - 0.05
    axes.text(left, last, "grpo", ha="center", va="center", fontsize=11, weight="bold", bbox=chosen)
    axes.text(
        left + 0.6, last, "a program checks the answers: begin here", va="center", fontsize=9, color="#4b5563"
    )
    figure.savefig(path)


if __name__ == "__main__":
    main()
