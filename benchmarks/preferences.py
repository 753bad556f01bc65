"""Compare a reward model and DPO with TRL's RewardTrainer and DPOTrainer. Run: python benchmarks/preferences.py

Both train the same 36 M parameter Llama in fp32 on the same pairs: a prompt of 128 random tokens, and two answers of 16
to 192. An optimizer step takes eight pairs. Both compute the reference's log-probabilities before the first step, and
this time does not count. Trials find TRL's fastest number of pairs per pass; the library takes all of them. Then runs
of both alternate, every run in a separate process. Needs TRL:

    pip install --no-deps -r requirements/bench.txt
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import sft
from report import write_result
from rl_step import Setting, save_prompts

STEPS, SKIPPED, TRIAL_STEPS = 5, 1, 1
STEP_PAIRS, PROMPT_TOKENS, SHORTEST, LONGEST = 8, 128, 16, 192
MAX_TOKENS = PROMPT_TOKENS + LONGEST + 2
TRL_PAIRS = (1, 2, 4, 8)
"""Numbers of pairs per forward pass to try with TRL."""
SECTIONS: dict[str, dict[str, Any]] = {
    "reward model": {"reward_model": {}},
    "DPO": {"preference": {"loss": "dpo"}},
}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, taken in turn")
    parser.add_argument("--theirs", nargs=5, help="for this program's own processes")
    args = parser.parse_args()
    if args.theirs:
        train_with_trl(*args.theirs)
        return
    rows: list[dict[str, Any]] = []
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model, _ = save_prompts(Path(scratch), Setting(1, 1, 1, 1))
        pairs = save_pairs(Path(scratch) / "pairs.jsonl", model)
        for job in SECTIONS:
            tried = {
                size: _median(theirs(job, model, pairs, size, TRIAL_STEPS + SKIPPED)) for size in TRL_PAIRS
            }
            best = max(tried, key=lambda size: tried[size])
            found: dict[str, list[dict[str, float]]] = {}
            for round_number in range(args.rounds):
                output = Path(scratch) / f"{job} {round_number}"
                for who, train in (
                    ("TRL", partial(theirs, job, model, pairs, best, STEPS)),
                    ("one rank", partial(ours, job, model, pairs, output.with_suffix(".1"), 1)),
                    ("two ranks", partial(ours, job, model, pairs, output.with_suffix(".2"), 2)),
                ):
                    found.setdefault(who, []).extend(train())
                    print(job, who, round(_median(found[who]), 2), flush=True)
            for who, steps in found.items():
                rows.append(
                    {
                        "job": job,
                        "": f"TRL, {best} pair{'s' * (best > 1)} per pass"
                        if who == "TRL"
                        else f"vectorlm, {who}",
                        "pairs per second": f"{_median(steps):.2f}",
                        "times as fast": f"{_median(steps) / _median(found['TRL']):.2f}",
                        "peak memory of a process, MB": f"{max(step['peak_bytes'] for step in steps) / 1e6:.0f}",
                    }
                )
            runs[job] = {"trl_pairs_tried": tried, "steps": found}
            write_result("preferences", {"rounds": args.rounds}, rows, {"runs": runs})


def _median(steps: list[dict[str, float]]) -> float:
    return statistics.median(step["pairs_per_s"] for step in steps)


def save_pairs(path: Path, model: Path) -> Path:
    """Save pairs whose tokens are numbers, and the library's datasets next to them; one pair is held out."""
    from transformers import AutoTokenizer

    from vectorlm.data.preprocess import preprocess
    from vectorlm.data.settings import PreprocessSettings

    draw = random.Random(0)

    def text(length: int) -> str:
        return " ".join(str(draw.randrange(3, 8000)) for _ in range(length))

    rows = [
        {
            "prompt": text(PROMPT_TOKENS) + " ",
            "chosen": text(draw.randint(SHORTEST, LONGEST)),
            "rejected": text(draw.randint(SHORTEST, LONGEST)),
        }
        for _ in range(STEPS * STEP_PAIRS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for suffix, split in ((".train", None), (".held_out", "train[:1]")):
        settings = PreprocessSettings(
            load_path=str(path), save_path=str(path.with_suffix(suffix)), examples="pairs", split=split
        )
        preprocess(settings, AutoTokenizer.from_pretrained(model), MAX_TOKENS)
    return path


def ours(job: str, model: Path, pairs: Path, output: Path, world_size: int) -> list[dict[str, float]]:
    """Train with the library; return pairs per second and peak memory of each step but the first."""
    config = {
        "model": str(model),
        "train_parameters": {
            "output_dir": str(output),
            "max_seq_len": MAX_TOKENS,
            "epochs": 1,
            "optimizer": {"lr": 1e-6, "weight_decay": 0.0},
            "lr_scheduler_type": "constant",
            "logging_steps": 1000,
        },
        **SECTIONS[job],
        "dataset": {
            "train_bs": STEP_PAIRS // world_size,
            "eval_bs": 1,
            "train_ds": str(pairs.with_suffix(".train")),
            "eval_ds": str(pairs.with_suffix(".held_out")),
        },
    }
    path = output.with_suffix(".json")
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "vectorlm", "run", str(path), "--world_size", str(world_size)]
    peak_bytes = sft.run(command, os.environ.copy())[1]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["train/step_s"] for line in lines if "train/step_s" in line]
    return [{"pairs_per_s": STEP_PAIRS / step_s, "peak_bytes": peak_bytes} for step_s in seconds[SKIPPED:]]


def theirs(job: str, model: Path, pairs: Path, size: int, num_steps: int) -> list[dict[str, float]]:
    """Train with TRL in a separate process; return the same values as `ours`."""
    command = [sys.executable, __file__, "--theirs", job, str(model), str(pairs), str(size), str(num_steps)]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}
    output, peak_bytes = sft.run(command, environment)
    seconds = json.loads(output.strip().splitlines()[-1])
    return [{"pairs_per_s": STEP_PAIRS / step_s, "peak_bytes": peak_bytes} for step_s in seconds[SKIPPED:]]


def train_with_trl(job: str, model: str, pairs: str, size: str, num_steps: str) -> None:
    """Train with TRL, and print the seconds of each step."""
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

    times: list[list[float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            times.append([time.perf_counter()])

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            times[-1].append(time.perf_counter())

    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "max_length": MAX_TOKENS,
        "per_device_train_batch_size": int(size),
        "gradient_accumulation_steps": STEP_PAIRS // int(size),
        "max_steps": int(num_steps),
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    data = load_dataset("json", data_files=pairs, split="train")
    trainer: Any
    if job == "DPO":
        settings = DPOConfig(**common, precompute_ref_log_probs=True)
        trainer = DPOTrainer(model=model, args=settings, train_dataset=data, callbacks=[Clock()])
    else:
        trainer = RewardTrainer(
            model=model, args=RewardConfig(**common), train_dataset=data, callbacks=[Clock()]
        )
    trainer.train()
    print(json.dumps([end - start for start, end in times]))


if __name__ == "__main__":
    main()
