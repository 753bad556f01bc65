"""Compare optimizers with AdamW on Countdown, on three seeds. Run: python benchmarks/optimizers.py

A run fine-tunes the model of configs/countdown_student.yaml (0.1 M parameters) on one rank: 256 steps of 128 texts. An
optimizer gets the learning rate with the lowest final held-out loss on the first seed; AdamW's variants get AdamW's.
Accuracy is the share of 512 held-out questions whose greedy answer is right. Optimizers that are not installed are left
out. Writes results/optimizers.json after every run, and continues after an interruption.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from found import add_found, read_found
from parts import prepare
from report import ROOT, circumstances, mean_and_range, write_result

from vectorlm import HFEngine
from vectorlm.packages import is_installed
from vectorlm.ranks.topology import Topology
from vectorlm.rl.rewards.countdown import countdown_reward
from vectorlm.runs.config.load import load_config
from vectorlm.runs.fine_tuning import finetune
from vectorlm.train.optimizers import OPTIMIZERS

SEEDS = (0, 1, 2)
FOLDER = ROOT / "runs/optimizers"
OPTIMIZER = "train_parameters.optimizer"
PLAIN: dict[str, Any] = {f"{OPTIMIZER}.betas": [0.9, 0.999]}
"""Override for optimizers without `betas`: the default replaces the value of the config."""
ARMS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "adamw": ({}, (3e-3, 6e-3)),
    "adamw8bit": ({}, ()),
    "adamw4bit": ({}, ()),
    "adamw, fused, weights in bfloat16": (
        {f"{OPTIMIZER}.fused": True, "train_parameters.dtype": "bfloat16"},
        (),
    ),
    "muon": ({}, (3e-3, 6e-3)),
    "adafactor": (PLAIN, (3e-2, 1e-1)),
    "sgd, momentum 0.9": (
        {**PLAIN, f"{OPTIMIZER}.momentum": 0.9, f"{OPTIMIZER}.weight_decay": 0.0},
        (0.1, 0.3),
    ),
}
"""Settings of every optimizer besides its name, and learning rates to try; without any it gets AdamW's."""


def main() -> None:
    """Train, print and save."""
    prepare()
    names = [arm for arm in ARMS if is_installed(OPTIMIZERS[arm.split(",")[0]].package)]
    found = read_found(FOLDER)
    for name in names:
        for lr in ARMS[name][1]:
            train(found, name, lr, SEEDS[0])
    for seed in SEEDS:
        for name in names:
            train(found, name, best_rate(found, name), seed)
            rows = [row(found, arm) for arm in names if runs_of(found, arm)]
            write_result("optimizers", {"seeds": SEEDS}, rows, {"runs": found})


def train(found: list[dict[str, Any]], name: str, lr: float, seed: int) -> None:
    """Make a run and add its result to `found`, unless `found` has it."""
    known = {"optimizer": name, "lr": lr, "seed": seed}
    if any(known.items() <= run.items() for run in found):
        return
    output = FOLDER / f"{name.split(',')[0]}_{len(found)}"
    settings = {
        "train_parameters.output_dir": str(output),
        "train_parameters.seed": seed,
        "train_parameters.epochs": 2,
        "train_parameters.checkpointing_enabled": False,
        "train_parameters.logging_steps": 1000,
        "train_parameters.sampler": None,
        f"{OPTIMIZER}.name": name.split(",")[0],
        f"{OPTIMIZER}.lr": lr,
        **ARMS[name][0],
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    finetune(load_config(ROOT / "configs/countdown_student.yaml", overrides), Topology.from_environment())
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    run = {
        **known,
        "loss": lines[-1]["eval/loss"],
        "accuracy": accuracy(str(output / "final-model")),
        "ms": 1000 * statistics.median(line["time/optimizer_s"] for line in lines[1:]),
    }
    found.append(run)
    add_found(FOLDER, run)
    print(run, flush=True)


def accuracy(model: str) -> float:
    """Return the share of held-out questions that a model answers right."""
    path = ROOT / "data/countdown/held_out.jsonl"
    questions = [json.loads(line) for line in path.read_text().splitlines()]
    with HFEngine(model) as engine:
        answers = engine.generate_text(
            [question["prompt"] for question in questions], {"temperature": 0, "max_tokens": 12}
        )
    right = [
        countdown_reward(answer, **question) == 1 for answer, question in zip(answers, questions, strict=True)
    ]
    return statistics.fmean(right)


def best_rate(found: list[dict[str, Any]], name: str) -> float:
    """Return the learning rate with the lowest loss on the first seed."""
    tried = [run for run in found if run["optimizer"] == (name if ARMS[name][1] else "adamw")]
    return min((run for run in tried if run["seed"] == SEEDS[0]), key=lambda run: run["loss"])["lr"]


def runs_of(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the runs of an optimizer at its best learning rate."""
    return [run for run in found if run["optimizer"] == name and run["lr"] == best_rate(found, name)]


def row(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the table row of an optimizer."""
    runs, tried = runs_of(found, name), ARMS[name][1]
    return {
        "optimizer": name,
        "learning rate": f"{runs[0]['lr']:g}",
        "of": ", ".join(f"{rate:g}" for rate in tried) if tried else "AdamW's",
        "seeds": len(runs),
        "held-out loss": mean_and_range([run["loss"] for run in runs], digits=3),
        "right answers, %": mean_and_range([100 * run["accuracy"] for run in runs]),
        "ms an optimizer step": mean_and_range([run["ms"] for run in runs]),
        "commit": circumstances()["commit"],
    }


if __name__ == "__main__":
    main()
