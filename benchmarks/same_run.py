"""Train ten steps at an earlier commit and at this one, and compare metrics, samples and final weights bit by bit.

    python benchmarks/same_run.py --base cf5a138

The config files are the committed ones of each tree; only paths, lengths and frequencies are overridden. Runs of the
earlier commit are kept in `--folder` and not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from report import ROOT, write_result
from safetensors.torch import load_file

NUM_STEPS, BATCH_PER_RANK = 10, 64
# Prefixes of times and speeds, which differ between any two runs.
TIMES = ("time/", "perf/")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="cf5a138", help="the commit to compare with")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "same_run")
    parser.add_argument("--base_only", action="store_true", help="make the runs of the base, and stop")
    args = parser.parse_args()
    folder = args.folder.resolve()
    base = folder / "tree"
    if not base.is_dir():
        subprocess.run(["git", "worktree", "add", "--detach", str(base), args.base], cwd=ROOT, check=True)
    prepare(base, folder)
    rows = []
    for config in ("countdown_sft", "countdown_lora", "countdown_grpo"):
        for world_size in (1, 2):
            before = run(base, config, world_size, folder, "base")
            if not args.base_only:
                after = run(ROOT, config, world_size, folder, "here")
                rows.append({"config": config, "world_size": world_size, **compare(before, after)})
                print(rows[-1], flush=True)
    if rows:
        write_result("same_run", {"base": args.base, "num_steps": NUM_STEPS}, rows)
        sys.exit(any(row["differences"] for row in rows))


def prepare(tree: Path, folder: Path) -> None:
    """Make the data, and the warm-up model from which reinforcement learning starts."""
    for world_size in (1, 2):
        data = folder / f"data-{world_size}"
        if not data.is_dir():
            num_train = NUM_STEPS * BATCH_PER_RANK * world_size
            python(tree, "examples/make_countdown.py", "--output_dir", data, "--num_train", num_train)
    if not (folder / "data").is_dir():
        python(tree, "examples/make_countdown.py", "--output_dir", folder / "data")
    if not (folder / "warm" / "final-model").is_dir():
        overrides = {
            "model": folder / "data" / "model",
            "train_parameters.output_dir": folder / "warm",
            "train_parameters.sampler": "null",
            "dataset.train_ds": folder / "data" / "train",
            "dataset.eval_ds": folder / "data" / "eval",
        }
        train(tree, "countdown_warmup", 2, overrides)


def run(tree: Path, config: str, world_size: int, folder: Path, name: str) -> Path:
    """Train ten steps with the code of `tree`; return the output folder."""
    output = folder / f"{config}-{world_size}-{name}"
    if name == "base" and (output / "final-model").is_dir():
        return output
    subprocess.run(["rm", "-rf", str(output)], check=True)
    data = folder / ("data" if config == "countdown_grpo" else f"data-{world_size}")
    overrides: dict[str, Any] = {
        "train_parameters.output_dir": output,
        # A name that both commits accept.
        "train_parameters.sampler.sample_frequency": 4,
    }
    if config == "countdown_grpo":
        overrides |= {
            "model": folder / "warm" / "final-model",
            "train_parameters.sampler.prompts": data / "held_out.jsonl",
            "rl.prompts": data / "train.jsonl",
            "rl.max_steps": NUM_STEPS,
        }
    else:
        overrides |= {
            "model": data / "model",
            "train_parameters.sampler.prompts": data / "eval.jsonl",
            "train_parameters.epochs": 1,
            "train_parameters.logging_steps": 5,
            "dataset.train_ds": data / "train",
            "dataset.eval_ds": data / "eval",
        }
    train(tree, config, world_size, overrides)
    return output


def train(tree: Path, config: str, world_size: int, overrides: dict[str, Any]) -> None:
    script = "examples/rl_example_mp.py" if config == "countdown_grpo" else "examples/llama_example_mp.py"
    arguments = ["--yaml_path", f"configs/{config}.yaml", "--world_size", world_size]
    for name, value in overrides.items():
        arguments += ["--set", f"{name}={value}"]
    python(tree, script, *arguments)


def python(tree: Path, *arguments: object) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, *map(str, arguments)]
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)


def compare(before: Path, after: Path) -> dict[str, Any]:
    """Compare two runs; return the numbers of compared metrics and tensors, and the differences."""
    differences = []
    old, new = (lines(folder / "metrics.jsonl") for folder in (before, after))
    if old != new:
        names = {
            name
            for a, b in zip(old, new, strict=False)
            for name in a.keys() | b.keys()
            if a.get(name) != b.get(name)
        }
        differences.append(f"metrics: {len(old)} and {len(new)} lines, {sorted(names)}")
    for name in ("samples.jsonl", "rollouts.jsonl"):
        if (before / name).is_file() and lines(before / name) != lines(after / name):
            differences.append(name)
    weights = [next((folder / "final-model").glob("*.safetensors")) for folder in (before, after)]
    theirs, ours = map(load_file, weights)
    wrong = [name for name in theirs if name not in ours or not theirs[name].equal(ours[name])]
    if wrong or theirs.keys() != ours.keys():
        differences.append(f"weights: {wrong[:4]}")
    numbers = sum(len(line) for line in old)
    return {"metrics": numbers, "tensors": len(theirs), "differences": "; ".join(differences)}


def lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file without times and speeds."""
    return [
        {
            name: value
            for name, value in json.loads(line).items()
            if not name.startswith(TIMES) and not name.endswith(("_s", "time_taken"))
        }
        for line in path.read_text().splitlines()
    ]


if __name__ == "__main__":
    main()
