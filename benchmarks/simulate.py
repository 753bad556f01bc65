"""Simulate steps of reinforcement learning to find the fastest placement of engine and trainer.

The rules of dynamic sampling and staleness are real: the library's own source of rollouts runs on a simulated clock,
engine and trainer. With ``--check`` the program measures this machine's costs before each case of benchmarks/async.py
and after the last one. It also repeats the runs of async.py and compares their steps with simulated ones. Then it
simulates 8 GPUs and 8 nodes with published figures of H100 GPUs; nobody has measured these steps.
Run: python benchmarks/simulate.py --check
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from report import RESULTS, ROOT, write_result
from simulated import SKIPPED, STEPS, Costs, Work, simulate

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of sequences in the decoding steps that are timed."""
RUN_STEPS = 52
"""Number of steps in a compared run."""
GPU_STEPS = 16
"""Number of counted steps in a simulation of GPUs."""
CHECKED = {
    "taking turns on all, 1 rank": None,
    "taking turns, split": 0,
    "one step off": 1,
    "in flight, k = 2": 2,
}
"""Compared runs of async.py, and their largest staleness; None and 0 are synchronous."""
PICTURE = ROOT / "docs/images/simulation.png"


def decoding_costs(model: Path, devices: Sequence[int] | None) -> tuple[list[float], float]:
    """Measure the seconds of a decoding step by `SIZES`, and the overhead of a sequence, sampled as in async.py."""
    import vectorlm

    steps, admissions = [], []
    arguments = {
        "dtype": "float32",
        "max_model_len": 176,
        "kv_cache_memory_bytes": 256 << 20,
        "max_num_seqs": 512,
    }
    # About as long as the completions of async.py, because attention takes longer in a longer context.
    few, many = 4, 36
    with vectorlm.SamplingEngine(model, devices=devices, **arguments) as engine:
        for size in SIZES:
            group = min(size, 8)
            times = {}
            for tokens in (few, many):
                params = {"n": group, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "seed": 0}
                seen = []
                for repeat in range(4):
                    prompts = [
                        [3 + repeat, 4 + place // 50, 5 + place % 50] + [9] * 7
                        for place in range(size // group)
                    ]
                    began = time.perf_counter()
                    engine.sample(prompts, params)
                    seen.append(time.perf_counter() - began)
                times[tokens] = statistics.median(seen[1:])
            steps.append((times[many] - times[few]) / (many - few))
            admissions.append((times[few] - few * steps[-1]) / size)
    return steps, statistics.median(admissions[SIZES.index(32) :])


def between(steps: Sequence[float]) -> Callable[[float], float]:
    """Return a function that interpolates the times of `SIZES`, and extrapolates beyond the largest."""

    def step_s(size: float) -> float:
        last = max(1, min(len(SIZES) - 1, sum(measured_size < size for measured_size in SIZES)))
        x0, x1 = SIZES[last - 1 : last + 1]
        return steps[last - 1] + (steps[last] - steps[last - 1]) * (size - x0) / (x1 - x0)

    return step_s


def lines_of(output: Path) -> list[dict[str, float]]:
    """Return the metrics of the counted steps, which come after the first `SKIPPED`."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "time/step_s" in line][SKIPPED:]


def kept_groups(output: Path, tokenizer: Any) -> dict[int, list[tuple[int, ...]]]:
    """Return, by counted step, the groups that a run trained on, as numbers of tokens of their completions."""
    groups: dict[tuple[int, int], list[int]] = {}
    for line in (output / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["train_step"] > SKIPPED:
            # Unless a text was cut off, its last token is not in the text.
            tokens = len(tokenizer(row["completion"], add_special_tokens=False)["input_ids"])
            group = groups.setdefault((row["train_step"], row["group"]), [])
            group.append(tokens + (row["finish_reason"] == "stop"))
    found: dict[int, list[tuple[int, ...]]] = {}
    for (step, _), lengths in groups.items():
        found.setdefault(step, []).append(tuple(lengths))
    return found


def training(output: Path, tokenizer: Any) -> list[tuple[float, float]]:
    """Return the tokens of each step, with one prompt per group, and its seconds without waiting for the engine."""
    kept = kept_groups(output, tokenizer)
    return [
        (
            sum(map(sum, kept[int(line["step"])])) + line["rollout/groups"] * line["prompt/length_mean"],
            line["time/step_s"] - line["time/generate_s"],
        )
        for line in lines_of(output)
        if int(line["step"]) in kept
    ]


def training_costs(output: Path, tokenizer: Any) -> tuple[float, float]:
    """Fit the time of a step without waiting for the engine: constant seconds, and seconds per token."""
    slope, start = statistics.linear_regression(*zip(*training(output, tokenizer), strict=True))
    return start, slope


def work_of(output: Path, tokenizer: Any) -> Work:
    """Return the groups that a run sampled. Dropped groups get scaled lengths of kept ones, to match their mean."""
    kept = [lengths for groups in kept_groups(output, tokenizer).values() for lengths in groups]
    lines = lines_of(output)
    num_kept, num_sampled = (
        sum(line[f"rollout/{name}"] for line in lines) for name in ("groups", "sampled_groups")
    )
    num_dropped = round(len(kept) * (num_sampled / num_kept - 1))
    work = [(lengths, False) for lengths in kept]
    if num_dropped:
        mean = (
            sum(line["completion/length_mean"] * line["rollout/sampled_groups"] for line in lines)
            / num_sampled
        )
        mean_kept = statistics.fmean(length for lengths in kept for length in lengths)
        ratio = (mean * num_sampled - mean_kept * num_kept) / (num_sampled - num_kept) / mean_kept
        dice = random.Random(0)
        work += [
            (tuple(max(1, min(160, round(length * ratio))) for length in dice.choice(kept)), True)
            for _ in range(num_dropped)
        ]
    return Work(work, 32, round(lines[0]["prompt/length_mean"]), rounds=3)


def check() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure costs, repeat runs of async.py, simulate these runs, and compare the steps."""
    from transformers import AutoTokenizer

    bench = importlib.import_module("async")
    shared, split = bench.HEADLINE[0], bench.SPLIT
    other = bench.IN_FLIGHT.format(4)
    model = bench._home("long tail") / "warmup/final-model"
    cores = sorted(os.sched_getaffinity(0))
    half = cores[len(cores) // 2 :]
    decoding: dict[str, list[tuple[list[float], float]]] = {shared: [], split: []}

    def measure_decoding() -> None:
        for name, devices in ((shared, None), (split, half)):
            decoding[name].append(decoding_costs(model, devices))

    # Measurements of costs and runs alternate, because the machine's speed varies.
    for lengths in bench.CASES:
        bench._warm_up(lengths)
        measure_decoding()
        for name in (*CHECKED, *((other,) if lengths == "long tail" else ())):
            print(lengths, name, flush=True)
            bench._train(lengths, name, 0, RUN_STEPS)
    measure_decoding()
    tokenizer = AutoTokenizer.from_pretrained(model)
    measured: dict[str, Any] = {"sizes": SIZES, "decoding, each time": decoding}
    measured["decoding"] = {
        name: (
            [statistics.fmean(times) for times in zip(*(steps for steps, _ in found), strict=True)],
            statistics.fmean(admit_s for _, admit_s in found),
        )
        for name, found in decoding.items()
    }
    rows = []
    for lengths in bench.CASES:
        costs_of = {
            name: training_costs(bench._output(lengths, name, 0), tokenizer) for name in (shared, split)
        }
        # The slowdown while engine and trainer both compute, from a run that is not compared.
        start, slope = costs_of[split]
        if lengths == "long tail":
            both = training(bench._output(lengths, other, 0), tokenizer)
            slowdown = statistics.median(seconds / (start + slope * tokens) for tokens, seconds in both)
        measured[f"training, {lengths}"] = costs_of
        for name, staleness in CHECKED.items():
            on_all = name == shared
            output = bench._output(lengths, name, 0)
            steps, admit_s = measured["decoding"][shared if on_all else split]
            start, slope = costs_of[shared if on_all else split]
            costs = Costs(
                between(steps), admit_s, lambda tokens: start + slope * tokens, 0.0,  # noqa: B023
                both_at_once=1.0 if on_all else slowdown,
            )  # fmt: skip
            found = simulate(costs, work_of(output, tokenizer), staleness, drains=name == bench.DRAINED)
            seconds = [line["time/step_s"] for line in lines_of(output)]
            step_s = statistics.fmean(seconds)
            error = statistics.stdev(seconds) / len(seconds) ** 0.5
            rows.append(
                {
                    "run": name,
                    "lengths": lengths,
                    "measured, s a step": f"{step_s:.2f}",
                    "simulated": f"{found['step_s']:.2f}",
                    "off by, %": f"{100 * (found['step_s'] / step_s - 1):+.1f}",
                    "standard error of the measured, %": f"{100 * error / step_s:.1f}",
                }
            )
    measured["both at once"] = slowdown
    return rows, measured


BYTES, KV_BYTES, FLOPS = 2 * 8.03e9, 32 * 8 * 128 * 2 * 2, 2 * 8.03e9
"""Llama 3.1 8B in bf16: bytes of its weights, bytes of the KV cache per token, operations per token."""
BANDWIDTH, PEAK = 0.77 * 3.35e12, 0.5 * 989e12
"""H100 SXM, per second: bytes that decoding reaches (0.77 of the data sheet), and operations (half of the peak)."""
TRAINED_TOKENS_S = 5762 * 3 / 4
"""Trained tokens per second and GPU: torchtitan's speed of Llama 3.1 8B with FSDP on 8 H100, times 3/4 because the old
policy takes another forward pass."""
LENGTHS = {"short": (300, 0.7, 2048), "long": (3000, 0.8, 16384)}
"""Median, spread and maximum of log-normal completion lengths; these, and prompts of 512 tokens, are assumptions."""


def h100s(num_engines: int, num_trainers: int, mean: float) -> Costs:
    """Return the costs of one engine on each of `num_engines` GPUs, and of training on `num_trainers` GPUs."""
    context = 512 + mean / 2
    return Costs(
        step_s=lambda size: max((BYTES + size * context * KV_BYTES) / BANDWIDTH, size * FLOPS / PEAK),
        admit_s=512 / 16 * FLOPS / PEAK,
        train_s=lambda tokens: tokens / (TRAINED_TOKENS_S * num_trainers),
        swap_s=0.1,
        num_engines=num_engines,
        max_num_seqs=min(256, int((0.9 * 80e9 - BYTES) / (KV_BYTES * (512 + mean)))),
    )


def on_gpus() -> list[dict[str, Any]]:
    """Simulate 128 prompts with 16 completions each, on 8 GPUs and on 8 nodes of 8 GPUs."""
    rows = []
    for lengths, (median, sigma, most) in LENGTHS.items():
        for dropped in (0.0, 0.4):
            dice = random.Random(0)
            groups = [
                (tuple(min(most, max(1, round(dice.lognormvariate(0, sigma) * median))) for _ in range(16)),
                 dice.random() < dropped)
                for _ in range(4096)
            ]  # fmt: skip
            mean = statistics.fmean(length for group_lengths, _ in groups for length in group_lengths)
            work = Work(groups, 128, 512, rounds=8)
            for gpus in (8, 64):
                found = {
                    "taking turns": (simulate(h100s(gpus, gpus, mean), work, None, num_steps=GPU_STEPS), gpus)
                }
                for name, staleness in (("one step off", 1), ("in flight, k = 2", 2)):
                    shares = [gpus * eighths // 8 for eighths in range(2, 7)]
                    tried = [
                        (
                            simulate(
                                h100s(share, gpus - share, mean),
                                work,
                                staleness,
                                name == "one step off",
                                GPU_STEPS,
                            ),
                            share,
                        )
                        for share in shares
                    ]
                    found[name] = min(tried, key=lambda pair: pair[0]["step_s"])
                base = found["taking turns"][0]["step_s"]
                rows += [
                    {
                        "GPUs": gpus,
                        "completions": f"{lengths}, {mean:.0f} tokens in the mean, {most} at most",
                        "groups dropped, %": round(100 * dropped),
                        "run": name,
                        "GPUs that sample": engines,
                        "s a step (simulated)": f"{outcome['step_s']:.1f}",
                        "times as fast": f"{base / outcome['step_s']:.2f}",
                        "engines idle, %": f"{100 * outcome['engine_idle']:.0f}",
                        "trainer idle, %": f"{100 * outcome['trainer_idle']:.0f}",
                    }
                    for name, (outcome, engines) in found.items()
                ]
                print(*rows[-3:], sep="\n", flush=True)
    return rows


def draw(checked: list[dict[str, Any]], rows: list[dict[str, Any]], path: Path) -> None:
    """Draw simulated against measured steps, and the speed-up of each kind of run on GPUs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.6), dpi=120, layout="constrained")
    dots, bars = figure.subplots(1, 2, width_ratios=(1, 1.7))
    for name in CHECKED:
        mine = [row for row in checked if row["run"] == name]
        dots.scatter(
            [float(row["measured, s a step"]) for row in mine],
            [float(row["simulated"]) for row in mine],
            label=name,
        )
    most = 1.1 * max((float(row["measured, s a step"]) for row in checked), default=1.0)
    dots.plot([0, most], [0, most], color="black", lw=0.8)
    dots.fill_between([0, most], [0, 0.95 * most], [0, 1.05 * most], color="lightgray", label="within 5 %")
    dots.set(
        title="This machine: on the line, the simulation is right",
        xlabel="seconds of a step, measured",
        ylabel="seconds of a step, simulated",
    )
    dots.legend(frameon=False, fontsize=8)
    cases = list(dict.fromkeys((row["GPUs"], row["completions"], row["groups dropped, %"]) for row in rows))
    names = list(dict.fromkeys(row["run"] for row in rows))
    colours = ("tab:gray", "tab:orange", "tab:blue")
    for place, name in enumerate(names):
        values = [float(row["times as fast"]) for row in rows if row["run"] == name]
        places = [index + 0.27 * (place - 1) for index in range(len(cases))]
        bars.bar(places, values, width=0.26, color=colours[place], label=name)
    labels = [
        f"{gpus} GPUs\n{text.split(',')[0]}" + (f"\n{dropped} %\ndropped" if dropped else "")
        for gpus, text, dropped in cases
    ]
    bars.set_xticks(range(len(cases)), labels, fontsize=8)
    bars.axhline(1, color="black", lw=0.6)
    bars.set(
        title="H100 GPUs, simulated: higher is faster", ylabel="times as fast as taking turns on all GPUs"
    )
    bars.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path)


def main() -> None:
    """Simulate, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="measure this machine's costs and compare its steps"
    )
    args = parser.parse_args()
    path = RESULTS / "simulate.json"
    if args.check:
        checked, measured = check()
        for row in checked:
            print(row)
    else:
        saved = json.loads(path.read_text())
        checked, measured = saved["checked"], saved["measured"]
    rows = on_gpus()
    setting = {"steps": STEPS, "prompts_per_step": 128, "group_size": 16, "prompt_tokens": 512}
    write_result("simulate", setting, rows, {"checked": checked, "measured": measured})
    draw(checked, rows, PICTURE)


if __name__ == "__main__":
    main()
