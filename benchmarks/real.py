"""Compare GRPO and fine-tuning of SmolLM2-135M-Instruct in fp32 with TRL. Run: python benchmarks/real.py

GRPO samples 8 answers of 24 tokens to each of 8 chat questions of examples/small_sums.py. Fine-tuning takes eight texts
of 24 to 256 tokens a step: the library concatenates four of them in a pass, or takes one, and TRL pads them. Trials
find TRL's fastest number of rows per pass. Then all runs alternate, every run in a separate process. Run these first:

    vectorlm model HuggingFaceTB/SmolLM2-135M-Instruct data/smollm2
    python examples/small_sums.py --output_dir data/small_sums
    pip install --no-deps -r requirements/bench.txt
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import rl_step
import sft
from report import ROOT, write_result

MODEL, QUESTIONS = ROOT / "data/smollm2", ROOT / "data/small_sums/train.jsonl"
GRPO = rl_step.Setting(prompts=8, prompt_tokens=72, group=8, new_tokens=24)
"""Sizes of a GRPO step; a prompt of at most 72 tokens includes the template's system message."""
SHORTEST, LONGEST = 24, 256
ROWS_TRIED = {"GRPO": (8, 16, 32), "fine-tuning": (1, 2, 4, 8)}
TRIAL_STEPS = 2
WHO = {"TRL": (1, 8), "one rank": (1, 4), "one rank, 1 row per pass": (1, 1), "two ranks": (2, 4)}
"""Number of ranks, and rows per pass in fine-tuning; TRL takes its fastest number of rows."""

Steps = list[dict[str, float]]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, taken in turn")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        texts = save_texts(Path(scratch) / "texts")
        ours: dict[str, Callable[[Path, int, int], Steps]] = {
            "GRPO": lambda output, world_size, _: rl_step.ours(MODEL, QUESTIONS, output, GRPO, world_size),
            "fine-tuning": partial(sft.ours, MODEL, texts),
        }
        theirs: dict[str, Callable[[int, int], Steps]] = {
            "GRPO": partial(rl_step.theirs, MODEL, QUESTIONS, GRPO),
            "fine-tuning": partial(sft.theirs, MODEL, texts, packing="padding"),
        }
        for job, speed in (("GRPO", seconds_a_step), ("fine-tuning", tokens_a_second)):
            trials = {size: theirs[job](size, TRIAL_STEPS) for size in ROWS_TRIED[job]}
            tried = {size: speed(steps) for size, steps in trials.items()}
            best = (min if job == "GRPO" else max)(tried, key=lambda size: tried[size])
            # GRPO fills its passes by tokens, not by rows.
            found: dict[str, Steps] = {who: [] for who in WHO if job == "fine-tuning" or "pass" not in who}
            for round_number in range(args.rounds):
                for who in found:
                    output = Path(scratch) / f"{job} {who} {round_number}"
                    if who == "TRL":
                        found[who] += theirs[job](best, rl_step.STEPS)
                    else:
                        found[who] += ours[job](output, *WHO[who])
                    print(job, who, round(speed(found[who]), 2), flush=True)
            rows += [_row(job, who, steps, found["TRL"], best) for who, steps in found.items()]
            # TRL's memory with as many rows per pass as the library, if another number is its fastest.
            if job == "fine-tuning" and best != (same := WHO["one rank"][1]):
                rows.append(_row(job, "TRL", trials[same], found["TRL"], same))
            runs[job] = {"trl_rows_tried": tried, "steps": found}
            write_result("real", {"rounds": args.rounds}, rows, {"runs": runs})


def seconds_a_step(steps: Steps) -> float:
    """Return the median seconds per step."""
    return statistics.median(step["step_s"] for step in steps)


def tokens_a_second(steps: Steps) -> float:
    """Return the median tokens per second."""
    return statistics.median(step["tokens_per_s"] for step in steps)


def save_texts(folder: Path) -> Path:
    """Save texts of random tokens for TRL, and with labels for the library."""
    from datasets import Dataset

    draw = random.Random(0)
    texts = [
        [draw.randrange(100, 49_000) for _ in range(draw.randint(SHORTEST, LONGEST))]
        for _ in range((sft.STEPS + 1) * sft.STEP_ROWS)
    ]
    Dataset.from_list([{"input_ids": text} for text in texts]).save_to_disk(folder)
    rows = [{"input_ids": text, "labels": text} for text in texts[: sft.STEPS * sft.STEP_ROWS]]
    Dataset.from_list(rows).save_to_disk(folder.with_suffix(".packed"))
    return folder


def _row(job: str, who: str, steps: Steps, baseline: Steps, trl_rows: int) -> dict[str, Any]:
    if job == "GRPO":
        speed = f"{seconds_a_step(steps):.1f} s a step"
        ratio = seconds_a_step(baseline) / seconds_a_step(steps)
        update, sampling = (
            f"{statistics.median(step[key] for step in steps):.1f}" for key in ("update_s", "generate_s")
        )
    else:
        speed = f"{tokens_a_second(steps):.0f} tokens/s"
        ratio = tokens_a_second(steps) / tokens_a_second(baseline)
        update = sampling = ""
    return {
        "job": job,
        "": f"TRL, {trl_rows} row{'s' * (trl_rows > 1)} per pass" if who == "TRL" else f"vectorlm, {who}",
        "speed": speed,
        "update, s": update,
        "sampling, s": sampling,
        "times as fast": f"{ratio:.2f}",
        "most memory of a process, GB": f"{max(step['peak_bytes'] for step in steps) / 1e9:.1f}",
    }


if __name__ == "__main__":
    main()
