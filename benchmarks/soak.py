"""Check that memory, descriptors and threads do not grow in long runs. Run: python benchmarks/soak.py

First two ranks make 2,000 swaps and 2,000 calls of `sample` in one engine. Its last log-probabilities are compared with
the trained model's. Then two ranks train 500 asynchronous steps. Meanwhile the program records the memory, the open
file descriptors and the threads of every process. Writes results/soak.json and docs/images/soak.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from report import ROOT, write_result

FOLDER = ROOT / "runs" / "soak"
PICTURE = ROOT / "docs" / "images" / "soak.png"
WARM_UP = 0.1
"""Share of a run after which nothing should grow."""
EVERY_S = 0.5
ALLOWANCE = {"MiB": (0.02, 4), "descriptors": (0, 2), "threads": (0, 2)}
"""Allowed growth from the end of the warm-up to the end of the run: a share of the value, plus a number."""
LARGEST_DIFFERENCE = 1e-4
PROMPTS, NUM_TOKENS = [[4, 5, 6, 7, 8], [9, 10, 11]] * 4, 8
ENGINE_ARGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
KINDS = {"MiB": "memory in MiB", "descriptors": "open descriptors", "threads": "threads"}
COLOURS = {"launcher": "tab:gray", "rank 0": "tab:blue", "rank 1": "tab:cyan", "sampler": "tab:orange"}
Sample = dict[str, Any]
"""Seconds ``s`` since the start, and for every process ``{"MiB": …, "descriptors": …, "threads": …}``."""


def main() -> None:
    """Run both parts, print, save and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaps", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    # Not at the top, because spawned ranks import this file again.
    import vectorlm
    from vectorlm.runs.reinforcement import reinforce

    make = [sys.executable, str(ROOT / "examples/make_countdown.py"), "--output_dir", str(FOLDER / "data")]
    subprocess.run(make, check=True)
    with watching() as while_swapping:
        differences = vectorlm.launch(
            swap_and_sample, str(FOLDER / "data/model"), arguments.swaps, world_size=2
        )
    config, output = _config(arguments.steps)
    with watching() as while_training:
        vectorlm.launch(reinforce, config, world_size=2)
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    series = {
        f"{arguments.swaps:,} swaps and calls of sample": while_swapping,
        f"{arguments.steps:,} asynchronous steps": while_training,
    }
    setting = {
        "swaps": arguments.swaps,
        "largest difference of a log-probability afterwards": max(differences),
        "steps": steps[-1]["step"],
        "max_staleness": config.rl.async_.max_staleness,
        "largest staleness of a token": max(step.get("staleness/token_max", 0) for step in steps),
    }
    print(json.dumps(setting, indent=2))
    rows = [row for name, samples in series.items() for row in _rows(name, samples)]
    write_result("soak", setting, rows)
    draw(series)
    if grown := [line for name, samples in series.items() for line in _grown(name, samples)]:
        sys.exit("\n".join(grown))
    if max(differences) > LARGEST_DIFFERENCE or steps[-1]["step"] != arguments.steps:
        sys.exit("the engine does not hold the weights that were sent, or steps are missing")
    if setting["largest staleness of a token"] > setting["max_staleness"]:
        sys.exit("a token was older than it may be")


def swap_and_sample(folder: str, swaps: int) -> float:
    """Swap and sample on every rank; return the largest gap of the last log-probabilities to the model's."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from vectorlm import SamplingEngine

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(0)
    params = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
    with SamplingEngine(folder, **ENGINE_ARGS) as engine, torch.no_grad():
        for step in range(swaps):
            for parameter in model.parameters():
                # Shrink and grow alternately: weights that only grow would become infinite.
                parameter.mul_(1.01 if step % 2 else 1 / 1.0101)
            if engine.update(model, step).skipped:
                raise RuntimeError(f"swap {step} was skipped")
            samples = engine.sample(PROMPTS, params)
        difference = 0.0
        for prompt, (completion,) in zip(PROMPTS, samples, strict=True):
            tokens = torch.tensor([*prompt, *completion.token_ids])
            logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]
            difference = max(
                difference, (expected - torch.tensor(completion.sampler_logprobs)).abs().max().item()
            )
    return difference


def _config(steps: int) -> tuple[Any, Path]:
    """Return the config of the asynchronous run, and its new folder."""
    from vectorlm.runs.config.load import load_config

    data, output = FOLDER / "data", FOLDER / time.strftime("%Y%m%d-%H%M%S")
    changes = {
        "model": data / "model",
        "train_parameters.output_dir": output,
        "evaluation.prompts": data / "eval.jsonl",
        "evaluation.every": 50,
        "rl.prompts": data / "train.jsonl",
        "rl.prompts_per_step": 8,
        "rl.max_steps": steps,
        "rl.algorithm.dynamic_sampling": False,
        "rl.max_sampling_rounds": 1,
        "rl.async": "{max_staleness: 2, update: keep}",
    }
    overrides = [f"{name}={value}" for name, value in changes.items()]
    return load_config(ROOT / "configs/countdown_grpo.yaml", overrides), output


@contextmanager
def watching() -> Iterator[list[Sample]]:
    """Measure this process and all processes below it until the end of the `with` block."""
    samples: list[Sample] = []
    over = threading.Event()

    def watch() -> None:
        begin = time.monotonic()
        while not over.wait(EVERY_S):
            samples.append({"s": round(time.monotonic() - begin, 1), **_measure()})

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield samples
    over.set()
    thread.join()


def _measure() -> Sample:
    found: Sample = {}
    this = psutil.Process()
    num_ranks = 0
    for process in [this, *sorted(this.children(recursive=True), key=lambda child: child.pid)]:
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if process == this:
                name = "launcher"
            elif "vectorlm.sampling.sampler.process" in command:
                name = "sampler"
            elif "spawn_main" in command:
                name, num_ranks = f"rank {num_ranks}", num_ranks + 1
            else:
                # multiprocessing's resource trackers hold no data.
                continue
            if name in found:
                # A child that has just been forked has its parent's command line.
                continue
            with process.oneshot():
                found[name] = {
                    "MiB": round(process.memory_info().rss / 2**20, 1),
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                }
    return found


def _settled(samples: Sequence[Sample], process: str) -> list[Sample]:
    """Return the samples of a process after the warm-up, without the last 2%, in which the run ends."""
    there = [sample for sample in samples if process in sample and "sampler" in sample]
    return there[int(WARM_UP * len(there)) : int(0.98 * len(there))]


def _rows(name: str, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    rows = []
    for process in COLOURS:
        first, *_, last = settled = [sample[process] for sample in _settled(samples, process)]
        row: dict[str, Any] = {"run": name, "process": process}
        for kind, title in KINDS.items():
            values = [sample[kind] for sample in settled]
            row[f"{title}: after a tenth, at the end"] = f"{first[kind]}, {last[kind]}"
            row[f"most {kind}"] = max(values)
        rows.append(row)
    return rows


def _grown(name: str, samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a message for every value that grew by more than the allowance after the warm-up."""
    for process in COLOURS:
        first, *_, last = (sample[process] for sample in _settled(samples, process))
        for kind, (share, number) in ALLOWANCE.items():
            if last[kind] > first[kind] * (1 + share) + number:
                yield f"{name}: {process} grew from {first[kind]} to {last[kind]} {kind}"


def draw(series: dict[str, list[Sample]]) -> None:
    """Draw a column for each run and a line for each process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), dpi=120, layout="constrained")
    panels = figure.subplots(len(KINDS), len(series), sharex="col", squeeze=False)
    for (name, samples), column in zip(series.items(), panels.T, strict=True):
        for (kind, title), panel in zip(KINDS.items(), column, strict=True):
            for process, colour in COLOURS.items():
                there = [sample for sample in samples if process in sample]
                panel.plot(
                    [sample["s"] / 60 for sample in there],
                    [sample[process][kind] for sample in there],
                    color=colour,
                    label=process,
                    linewidth=1.2,
                )
            panel.set_ylim(bottom=0)
            panel.set_ylabel(title, fontsize=9)
            panel.grid(alpha=0.3)
        column[0].set_title(name, fontsize=10)
        column[-1].set_xlabel("minutes", fontsize=9)
    panels[0][0].legend(fontsize=8, ncols=2)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
