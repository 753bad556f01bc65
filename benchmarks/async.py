"""Measure the gain from overlapping sampling and training on two cores. Run: python benchmarks/async.py

The runs train a model by GRPO on Countdown. It writes filler after its answer, to lengths with a long tail or all
equal. Engine and ranks take turns on all cores, take turns on half of the cores each, or compute concurrently on half
of the cores each. Run no other program meanwhile.
Writes results/async.json, docs/images/async.png and docs/images/async_timeline.png.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from found import add_found, read_found
from long_countdown import LONGEST, LONGEST_COMPLETION, save_questions
from report import RESULTS, ROOT, circumstances, mean_and_range, write_result

KEPT = Path(__file__).with_name("filler_reward.py")
FOLDER, IMAGES = ROOT / "runs" / "async", ROOT / "docs/images"
SKIPPED = 10
"""First steps, which the means leave out: the queue fills until step k."""
SMOOTHED, THRESHOLDS = 10, (0.25, 0.28)
"""Number of consecutive steps whose mean Countdown reward is compared, and the thresholds that it must reach."""
SHARED, SPLIT, DRAINED, IN_FLIGHT = (
    "taking turns on all",
    "taking turns, split",
    "one step off",
    "in flight, k = {}",
)
HEADLINE = (f"{SHARED}, 1 rank", IN_FLIGHT.format(2))
CONTROLS = (*HEADLINE, SPLIT, DRAINED)
CASES = {"long tail": True, "equal": True, "equal, every group": False}
"""Lengths, and whether dynamic sampling replaces groups of equal rewards: it adds a tail to a synchronous step."""


def overlap(staleness: int, update: str = "keep") -> dict[str, Any]:
    """Return a section `rl.async` that gives engine and ranks half of the cores each."""
    return {"max_staleness": staleness, "update": update, "placement": "split"}


RUNS: dict[str, tuple[int, dict[str, Any] | None]] = {
    f"{SHARED}, 1 rank": (1, None),
    f"{SHARED}, 2 ranks": (2, None),
    SPLIT: (1, overlap(0)),
    DRAINED: (1, overlap(1, "drain")),
    **{IN_FLIGHT.format(staleness): (1, overlap(staleness)) for staleness in (1, 2, 4, 8)},
}
"""By run: the number of ranks, and the section `rl.async`; None for a synchronous run."""


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2, 3, 4), help="of the headline pair")
    parser.add_argument("--other_seeds", nargs="+", type=int, default=(0,), help="of all others")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--keep", action="store_true", help="keep what the last result has beside these")
    arguments = parser.parse_args()
    jobs = []
    for lengths in arguments.cases:
        _warm_up(lengths)
        for seed in arguments.seeds:
            for name in RUNS if lengths == "long tail" else CONTROLS:
                if name not in arguments.runs:
                    continue
                in_all = lengths == "long tail" and name in HEADLINE
                if in_all or seed in arguments.other_seeds:
                    jobs.append({"lengths": lengths, "run": name, "seed": seed, "steps": arguments.steps})
    done = {_key(run) for run in read_found(FOLDER)}
    for job in jobs:
        if _key(job) not in done:
            print(*job.values(), flush=True)
            add_found(FOLDER, job | _train(**job))
    wanted = {_key(job) for job in jobs}
    found = [run for run in read_found(FOLDER) if _key(run) in wanted]
    commits = {(run["lengths"], run["run"]): circumstances()["commit"] for run in found}
    if arguments.keep:
        last = json.loads((RESULTS / "async.json").read_text())
        found += [run for run in last["runs"] if (run["lengths"], run["run"]) not in commits]
        commits = {(row["lengths"], row["run"]): row["commit"] for row in last["rows"]} | commits
    rows = [
        _row(lengths, name, found) | {"commit": commits[lengths, name]}
        for lengths in CASES
        for name in RUNS
        if _of(found, lengths, name)
    ]
    setting = {"seeds": list(arguments.seeds), "steps": arguments.steps, "thresholds": THRESHOLDS}
    write_result("async", setting, rows, {"runs": found})
    draw(found, IMAGES / "async.png")
    if "long tail" in arguments.cases and HEADLINE[1] in arguments.runs:
        shutil.copy(_output("long tail", HEADLINE[1], 0) / "timeline.png", IMAGES / "async_timeline.png")


def _key(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["lengths"], run["run"], run["seed"], run["steps"]


def _home(lengths: str) -> Path:
    """Return the folder of the questions and the model; cases with the same lengths share it."""
    return FOLDER / lengths.partition(",")[0].replace(" ", "_")


def _output(lengths: str, name: str, seed: int) -> Path:
    return FOLDER / f"{lengths}_{name}_{seed}".replace(" ", "").replace(",", "_")


def _common(lengths: str, output: Path) -> dict[str, Any]:
    return {
        "output_dir": str(output),
        "max_seq_len": LONGEST,
        "sampler": {
            "sample_frequency": 1000,
            "prompts": str(_home(lengths) / "eval.jsonl"),
            "reward": "countdown",
            "vllm_dtype": "float32",
            "sampling_params": {"temperature": 1.0, "max_tokens": LONGEST_COMPLETION},
            "engine": {
                "max_model_len": LONGEST,
                "kv_cache_memory_bytes": 256 << 20,
                "max_num_seqs": 512,
            },
        },
    }


def _warm_up(lengths: str) -> None:
    """Fine-tune the model of configs/countdown_warmup.yaml on answers with filler, unless this was done before."""
    start = ROOT / "runs/countdown_warmup/final-model"
    if not start.exists():
        sys.exit(
            "first: python examples/llama_example_mp.py --yaml_path configs/countdown_warmup.yaml --world_size 2"
        )
    home = _home(lengths)
    if (home / "warmup/final-model").exists():
        return
    save_questions(home, start, lengths.partition(",")[0])
    config = {
        "model": str(home / "model"),
        "train_parameters": _common(lengths, home / "warmup")
        | {
            "epochs": 1,
            "optimizer": {"lr": 2e-3, "weight_decay": 0.01, "betas": [0.9, 0.98]},
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.05,
        },
        "dataset": {
            "train_bs": 44,
            "eval_bs": 128,
            "train_ds": str(home / "train"),
            "eval_ds": str(home / "eval"),
        },
    }
    _run("llama_example_mp.py", config, home / "warmup.json", world_size=2)


def _train(lengths: str, run: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once, and return a summary of the metrics."""
    world_size, overlap = RUNS[run]
    output = _output(lengths, run, seed)
    config = {
        "model": str(_home(lengths) / "warmup/final-model"),
        "train_parameters": _common(lengths, output)
        | {
            "seed": seed,
            "optimizer": {"lr": 3e-4, "weight_decay": 0.0, "betas": [0.9, 0.98]},
            "lr_scheduler_type": "constant",
            "checkpointing_enabled": False,
        },
        "rl": {
            # As in DAPO: a mean per completion would teach right answers to be short
            "algorithm": {"name": "grpo", "reduction": "token_mean", "dynamic_sampling": CASES[lengths]},
            "max_steps": steps,
            "prompts": str(_home(lengths) / "train.jsonl"),
            "prompts_per_step": 32,
            "group_size": 8,
            "sampling_params": {"temperature": 1.0, "max_tokens": LONGEST_COMPLETION},
            "rewards": {"countdown": 1.0, f"{KEPT}:kept": 0.5},
            "max_sampling_rounds": 3,
            "num_mini_batches": 2,
            # In small passes, short rows are not padded to the length of the longest
            "max_tokens_per_micro_batch": 2048,
            "correction": {"preset": "tis"},
            "show_every": 0,
        },
    }
    if overlap is not None:
        config["rl"]["async"] = overlap
    _run("rl_example_mp.py", config, output.with_suffix(".json"), world_size)
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return _summary(metrics) | {"lag": _lag(output / "rollouts.jsonl")}


def _run(script: str, config: dict[str, Any], path: Path, world_size: int) -> None:
    path.write_text(json.dumps(config))
    command = [sys.executable, str(ROOT / "examples" / script), "--yaml_path", str(path)]
    subprocess.run(
        [*command, "--world_size", str(world_size)],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )


def _summary(metrics: list[dict[str, float]]) -> dict[str, Any]:
    """Return mean times and shares, and for every step its reward and the seconds until its end.

    Means, because with requests in flight only some steps wait for groups; a median would leave out the waiting.
    """
    steps = [line for line in metrics if "time/step_s" in line]
    counted = steps[SKIPPED:]
    seconds = [line["time/step_s"] for line in steps]
    summary = {
        "reward": [line["reward/countdown/mean"] for line in steps],
        "ends_s": list(accumulate(seconds)),
        "tokens": statistics.fmean(line["completion/length_mean"] for line in counted),
        "longest": statistics.fmean(line["completion/length_max"] for line in counted),
    }
    for name in ("step", "generate", "update", "assess", "publish", "stall"):
        summary[f"{name}_s"] = statistics.fmean(line[f"time/{name}_s"] for line in counted)
    for name in (
        "perf/engine_idle",
        "perf/trainer_idle",
        "perf/stall",
        "correction/ess",
        "staleness/token_mean",
    ):
        summary[name] = statistics.fmean(line[name] for line in counted)
    summary["staleness/token_max"] = max(line["staleness/token_max"] for line in counted)
    return summary


def _lag(path: Path) -> float:
    """Return the mean number of steps between the first token of a completion and its training."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return statistics.fmean(
        line["train_step"] - 1 - line["version"] for line in lines if line["train_step"] > SKIPPED
    )


def _of(found: list[dict[str, Any]], lengths: str, name: str) -> list[dict[str, Any]]:
    return [run for run in found if run["run"] == name and run["lengths"] == lengths]


def smoothed(run: dict[str, Any]) -> list[float]:
    """Return the running mean reward of the last `SMOOTHED` steps, beginning at step `SMOOTHED`."""
    reward = run["reward"]
    return [statistics.fmean(reward[end - SMOOTHED : end]) for end in range(SMOOTHED, len(reward) + 1)]


def time_to(threshold: float, run: dict[str, Any]) -> tuple[int, float] | None:
    """Return the steps and seconds until the smoothed reward reaches the threshold; None if it never does."""
    for steps, mean in enumerate(smoothed(run), SMOOTHED):
        if mean >= threshold:
            return steps, run["ends_s"][steps - 1]
    return None


def predictions(found: list[dict[str, Any]], lengths: str) -> dict[str, float]:
    """Return the predicted seconds of a step, by run in which engine and ranks overlap: the time of the slower one.

    Both times come from the run that takes turns on half of the cores each.
    """
    runs = _of(found, lengths, SPLIT)
    if not runs:
        return {}
    sampling = statistics.fmean(run["generate_s"] for run in runs)
    training = statistics.fmean(run["step_s"] - run["generate_s"] for run in runs)
    return {
        name: max(sampling, training)
        for name, (_, overlap) in RUNS.items()
        if overlap is not None and overlap["max_staleness"] > 0
    }


def _row(lengths: str, name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    def mean(key: str) -> float:
        return statistics.fmean(run[key] for run in runs)

    runs = _of(found, lengths, name)
    seeds = {run["seed"] for run in runs}
    beside = [run["step_s"] for run in _of(found, lengths, HEADLINE[0]) if run["seed"] in seeds]
    predicted = predictions(found, lengths).get(name)
    overlap = RUNS[name][1]
    reached = {}
    for threshold in THRESHOLDS:
        there = [arrival for run in runs if (arrival := time_to(threshold, run)) is not None]
        num_never = len(runs) - len(there)
        never = f"not reached by {num_never} of {len(runs)} seeds" if num_never else ""
        reached[f"steps to reward {threshold}"] = mean_and_range([steps for steps, _ in there], 0)
        seconds = mean_and_range([seconds for _, seconds in there], 0)
        reached[f"s to reward {threshold}"] = (
            ", ".join(filter(None, (seconds, never))) if there else "not reached"
        )
    return {
        "run": name,
        "lengths": lengths,
        "seeds": len(runs),
        "tokens, mean and longest": f"{mean('tokens'):.0f}, {mean('longest'):.0f}",
        "s a step": mean_and_range([run["step_s"] for run in runs], 2),
        "predicted": "" if predicted is None else f"{predicted:.2f}",
        "times as fast": f"{statistics.fmean(beside) / mean('step_s'):.2f}",
        **reached,
        "reward at the end": f"{statistics.fmean(statistics.fmean(r['reward'][-SMOOTHED:]) for r in runs):.2f}",
        "lag": f"{mean('lag'):.2f}",
        "by formula": str(overlap["max_staleness"] if overlap is not None else 0),
        "lag of a token, mean and most": f"{mean('staleness/token_mean'):.2f}, {mean('staleness/token_max'):.0f}",
        "ESS": f"{mean('correction/ess'):.2f}",
        "stall, %": f"{100 * mean('perf/stall'):.1f}",
        "engine idle, %": f"{100 * mean('perf/engine_idle'):.0f}",
        "trainer idle, %": f"{100 * mean('perf/trainer_idle'):.0f}",
    }


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the reward of the headline pair against time, and the step time of every run with its prediction."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=120, layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(1.15, 1))
    for name, colour in zip(HEADLINE, ("tab:gray", "tab:blue"), strict=True):
        label = name
        for run in _of(found, "long tail", name):
            curves.plot(
                run["ends_s"][SMOOTHED - 1 :], smoothed(run), color=colour, alpha=0.75, lw=1.2, label=label
            )
            label = ""
    for threshold in THRESHOLDS:
        curves.axhline(threshold, color="black", lw=0.6)
    curves.set(
        title="Long tail: reward against time, one line per seed",
        xlabel="seconds of training",
        ylabel=f"mean reward of {SMOOTHED} steps",
        xlim=(0, None),
    )
    curves.legend(frameon=False)
    labels = []
    for lengths in CASES:
        expected = predictions(found, lengths)
        for name in RUNS:
            runs = _of(found, lengths, name)
            if not runs:
                continue
            place = len(labels)
            colour = "tab:blue" if name in expected else "tab:gray"
            bars.barh(place, statistics.fmean(run["step_s"] for run in runs), color=colour, height=0.7)
            if name in expected:
                bars.plot([expected[name]] * 2, [place - 0.42, place + 0.42], color="black", lw=2)
            labels.append(f"{name} ({lengths})")
    bars.set_yticks(range(len(labels)), labels, fontsize=8)
    bars.invert_yaxis()
    bars.set(title="A step; mark: predicted", xlabel="seconds, mean")
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
    figure.savefig(path)


if __name__ == "__main__":
    main()
