"""Reproduce results of three papers on two CPU cores. Run: python benchmarks/papers.py --train   (or make papers)

PPO and GRPO learn Countdown, as in TinyZero. Importance weights correct for an engine that differs from the policy.
One-step-off training is compared with synchronous training. With --train the benchmarks behind these results run first,
for hours, and learned_reward.py too, which draws its own picture. Without it the program draws the stored results.
Writes results/papers.json and docs/images/papers.png.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from report import RESULTS, ROOT, mean_and_range, write_result

# An import statement cannot name it, because `async` is a keyword.
overlapping = importlib.import_module("async")

TURNS, ONE_OFF = overlapping.HEADLINE[0], overlapping.DRAINED
COMMANDS = (
    ("countdown.py", "--algorithms", "ppo", "grpo", "--keep"),
    ("correction.py",),
    ("async.py", "--cases", "long tail", "--runs", TURNS, ONE_OFF, "--other_seeds", "0", "1", "2", "--keep"),
    ("learned_reward.py",),
)
GREY, BLUE, ORANGE = "tab:gray", "tab:blue", "tab:orange"


def main() -> None:
    """Train with --train; then print, save and draw the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true", help="run the benchmarks first")
    if parser.parse_args().train:
        for command in COMMANDS:
            subprocess.run([sys.executable, str(ROOT / "benchmarks" / command[0]), *command[1:]], check=True)
    countdown, correction, overlap = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("countdown", "correction", "async")
    )
    rows = [*_countdown_rows(countdown), *_correction_rows(correction), *_overlap_rows(overlap)]
    write_result(
        "papers", {"commands": [" ".join(("python benchmarks/" + c[0], *c[1:])) for c in COMMANDS]}, rows
    )
    _draw(countdown, correction, overlap)


def _countdown_rows(result: dict[str, Any]) -> list[dict[str, str]]:
    rows = {row["algorithm"]: row for row in result["rows"]}
    return [
        {
            "result": "TinyZero: a policy learns Countdown from its own answers",
            "run": name.upper(),
            "seeds": str(len(result["accuracy_by_step"][name])),
            "measured": f"right answers {rows[name]['before, %'].split()[0]} to {rows[name]['after, %']} %",
            "commit": rows[name]["commit"],
        }
        for name in ("ppo", "grpo")
    ]


def _correction_rows(result: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "result": "TIS: importance weights where the engine is not the policy",
            "run": f"{mismatch}, {'corrected' if preset == 'tis' else 'uncorrected'}",
            "seeds": str(len(_gains(result, mismatch, preset))),
            "measured": f"{mean_and_range(_gains(result, mismatch, preset))} points gained",
            "commit": result["commit"],
        }
        for mismatch in ("bf16", "stale by 8")
        for preset in ("off", "tis")
    ]


def _overlap_rows(result: dict[str, Any]) -> list[dict[str, str]]:
    rows = {row["run"]: row for row in result["rows"] if row["lengths"] == "long tail"}
    return [
        {
            "result": "Asynchronous RLHF: one step off against taking turns",
            "run": name,
            "seeds": str(rows[name]["seeds"]),
            "measured": f"{rows[name]['s a step']} s a step; reward 0.28 after {rows[name]['steps to reward 0.28']} "
            f"steps, {rows[name]['s to reward 0.28']} s",
            "commit": rows[name]["commit"],
        }
        for name in (TURNS, ONE_OFF)
    ]


def _gains(result: dict[str, Any], mismatch: str, preset: str) -> list[float]:
    return [
        100 * (run["after"] - run["before"])
        for run in result["runs"]
        if (run["mismatch"], run["correction"]) == (mismatch, preset)
    ]


def _draw(countdown: dict[str, Any], correction: dict[str, Any], overlap: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.4), dpi=110, layout="constrained")
    learning, weights, reward = figure.subplots(1, 3)
    for name, colour in (("ppo", BLUE), ("grpo", ORANGE)):
        for index, run in enumerate(countdown["accuracy_by_step"][name]):
            steps, right = zip(*run, strict=True)
            label = name.upper() if index == 0 else None
            learning.plot(steps, [100 * share for share in right], color=colour, label=label, alpha=0.8)
    learning.set(
        title="TinyZero: both learn Countdown", xlabel="step (a batch of rollouts)", ylabel="right answers, %"
    )
    mismatches = ("none", "bf16", "stale by 2", "stale by 4", "stale by 8")
    for preset, shift, colour, label in (("off", -0.13, GREY, "uncorrected"), ("tis", 0.13, BLUE, "TIS")):
        for place, mismatch in enumerate(mismatches):
            points = _gains(correction, mismatch, preset)
            weights.plot([place + shift] * len(points), points, "o", color=colour, alpha=0.4)
            mean = statistics.fmean(points)
            ends = [place + shift - 0.1, place + shift + 0.1]
            weights.plot(ends, [mean, mean], color=colour, lw=3, label=label if place == 0 else None)
    weights.axhline(0, color="black", lw=0.6)
    weights.set_xticks(range(len(mismatches)), mismatches)
    weights.set(title="TIS: weights save a stale policy", ylabel="points of accuracy gained")
    for name, colour in ((TURNS, GREY), (ONE_OFF, BLUE)):
        shown: str | None = "taking turns" if name == TURNS else name
        for run in overlapping._of(overlap["runs"], "long tail", name):
            smooth: Sequence[float] = overlapping.smoothed(run)
            reward.plot(
                run["ends_s"][overlapping.SMOOTHED - 1 :], smooth, color=colour, label=shown, alpha=0.8
            )
            shown = None
    reward.set(
        title="One step off against taking turns",
        xlabel="seconds of training",
        ylabel=f"mean reward of {overlapping.SMOOTHED} steps",
    )
    for axes in (learning, weights, reward):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.savefig(ROOT / "docs/images/papers.png")


if __name__ == "__main__":
    main()
