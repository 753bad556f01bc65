"""Measure each algorithm on Countdown with three seeds. Run: python benchmarks/countdown.py   (or make countdown)

The RL runs, one config per algorithm, start from the model of one supervised warm-up. Accuracy is the share of held-out
questions answered right at temperature 1. Writes results/countdown.json and docs/images/countdown_rl.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from parts import prepare, run_program
from report import RESULTS, ROOT, circumstances, mean_and_range, write_result

ALGORITHMS = ("ppo", "grpo", "rloo", "online_dpo")
COLOURS = dict(zip(ALGORITHMS, ("tab:blue", "tab:orange", "tab:green", "tab:red"), strict=True))
Curve = list[tuple[int, float]]


def main() -> None:
    """Train, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--world_size", type=int, default=2)
    parser.add_argument(
        "--keep", action="store_true", help="keep the rows of the last result that are not measured now"
    )
    arguments = parser.parse_args()
    prepare("countdown_warmup")
    rows, curves = _kept(set(ALGORITHMS) - set(arguments.algorithms)) if arguments.keep else ([], {})
    for algorithm in arguments.algorithms:
        runs, times_s = [], []
        for seed in arguments.seeds:
            output = f"runs/countdown_{algorithm}_seed{seed}"
            settings = [f"train_parameters.output_dir={output}", f"train_parameters.seed={seed}"]
            start = time.perf_counter()
            _run_config(
                "examples/rl_example_mp.py", f"countdown_{algorithm}", arguments.world_size, *settings
            )
            times_s.append(time.perf_counter() - start)
            runs.append(_accuracy(ROOT / output / "metrics.jsonl"))
        curves[algorithm] = runs
        gains = [100 * (run[-1][1] - run[0][1]) for run in runs]
        rows.append(
            {
                "algorithm": algorithm,
                "before, %": mean_and_range([100 * run[0][1] for run in runs]),
                "after, %": mean_and_range([100 * run[-1][1] for run in runs]),
                "gain, points": mean_and_range(gains),
                "longest run, s": round(max(times_s)),
                "commit": circumstances()["commit"],
            }
        )
        print(rows[-1], flush=True)
    setting = {"world_size": arguments.world_size, "seeds": list(arguments.seeds)}
    write_result("countdown", setting, rows, {"accuracy_by_step": curves})
    _draw(curves, ROOT / "docs/images/countdown_rl.png")


def _kept(algorithms: set[str]) -> tuple[list[dict[str, Any]], dict[str, list[Curve]]]:
    """Return the rows and curves of these algorithms in the last result."""
    last = json.loads((RESULTS / "countdown.json").read_text())
    curves = {name: runs for name, runs in last["accuracy_by_step"].items() if name in algorithms}
    return [row for row in last["rows"] if row["algorithm"] in algorithms], curves


def _run_config(script: str, name: str, world_size: int, *settings: str) -> None:
    overrides = [word for setting in settings for word in ("--set", setting)]
    run_program(script, "--yaml_path", f"configs/{name}.yaml", "--world_size", str(world_size), *overrides)


def _accuracy(path: Path) -> Curve:
    lines = map(json.loads, path.read_text().splitlines())
    return [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]


def _draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Draw the mean and the range over the seeds for each algorithm."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

    figure = Figure(figsize=(8, 4.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    for algorithm, runs in curves.items():
        steps = [step for step, _ in runs[0]]
        by_step = [[run[index][1] for run in runs] for index in range(len(steps))]
        mean = [statistics.fmean(values) for values in by_step]
        axes.plot(steps, mean, label=algorithm, color=COLOURS[algorithm], marker="o", markersize=4)
        axes.fill_between(
            steps, list(map(min, by_step)), list(map(max, by_step)), color=COLOURS[algorithm], alpha=0.15
        )
    axes.set(
        title="Countdown: right answers to held-out questions, sampled at temperature 1",
        xlabel="step (a batch of rollouts)",
        ylabel="share of questions; line: mean, band: range of seeds",
    )
    axes.yaxis.set_major_locator(MultipleLocator(0.05))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path)


if __name__ == "__main__":
    main()
