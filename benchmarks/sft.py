"""Compare fine-tuning with TRL's SFTTrainer, both with packing. Run: python benchmarks/sft.py

Both train the same 36 M parameter Llama in fp32 on the same texts of random tokens, whose lengths have a long tail. An
optimizer step takes eight rows of 1,024 tokens, into which each library packs the texts itself (TRL: `bfd`, ours:
`packing_type: full`). Trials find TRL's fastest number of rows per pass; ours takes one. Then runs of both alternate,
every run in a separate process. Needs TRL: pip install --no-deps -r requirements/bench.txt
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import ROOT, write_result
from rl_step import IN_HEAD, IN_LAYERS, Setting, matmul_peak, save_prompts

STEPS, SKIPPED, TRIAL_STEPS = 4, 1, 1
MAX_TOKENS, STEP_ROWS, MEAN_TOKENS = 1024, 8, 256
TRL_ROWS = (1, 2, 4)
"""Numbers of packed rows per forward pass to try with TRL."""


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, taken in turn")
    args = parser.parse_args()
    peak = matmul_peak()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model, _ = save_prompts(Path(scratch), Setting(1, 1, 1, 1))
        data = save_texts(Path(scratch) / "texts")
        tried = {}
        for size in TRL_ROWS:
            steps = theirs(model, data, size, SKIPPED + TRIAL_STEPS)
            tried[size] = statistics.median(step["tokens_per_s"] for step in steps)
        best = max(tried, key=lambda size: tried[size])
        for round_number in range(args.rounds):
            for who in ("TRL", "one rank", "two ranks"):
                if who == "TRL":
                    steps = theirs(model, data, best, STEPS)
                else:
                    steps = ours(
                        model, data, Path(scratch) / f"{who} {round_number}", 1 if who == "one rank" else 2
                    )
                found.setdefault(who, []).extend(steps)
                print(who, [round(step["tokens_per_s"]) for step in steps], flush=True)
    baseline = statistics.median(step["tokens_per_s"] for step in found["TRL"])
    rows = []
    for who, steps in found.items():
        speed = statistics.median(step["tokens_per_s"] for step in steps)
        rows.append(
            {
                "": f"TRL, {best} row{'s' * (best > 1)} per pass" if who == "TRL" else f"vectorlm, {who}",
                "tokens per second": f"{speed:.0f}",
                "times as fast": f"{speed / baseline:.2f}",
                "peak memory of a process, MB": f"{max(step['peak_bytes'] for step in steps) / 1e6:.0f}",
                "share of the matmul peak, %": f"{100 * 6 * (IN_LAYERS + IN_HEAD) * speed / peak:.0f}",
            }
        )
    setting = {
        "steps": STEPS - SKIPPED,
        "rounds": args.rounds,
        "tokens_a_step": STEP_ROWS * MAX_TOKENS,
        "matmul_gflops": round(peak / 1e9),
        "trl_rows_tried_tokens_per_s": tried,
    }
    write_result("sft", setting, rows, {"steps": found})


def save_texts(folder: Path) -> Path:
    """Save texts of random tokens for TRL, and next to them the rows that the library packs them into."""
    from datasets import Dataset

    from vectorlm.data.pack import Frame, TokenisedText, pack_texts
    from vectorlm.data.summary import Summary

    generator = random.Random(0)
    texts: list[TokenisedText] = []
    while sum(map(len, texts)) < (STEPS + 1) * STEP_ROWS * MAX_TOKENS:
        length = min(max(int(generator.expovariate(1 / MEAN_TOKENS)), 16), MAX_TOKENS)
        ids = [generator.randrange(3, 8000) for _ in range(length)]
        texts.append(TokenisedText(ids, [True] * length))
    Dataset.from_list([{"input_ids": text.input_ids} for text in texts]).save_to_disk(folder)
    packed = pack_texts(texts, Frame(MAX_TOKENS), Summary(MAX_TOKENS, ignore_index=-100), "full")
    rows = [
        {"input_ids": row.input_ids, "labels": row.labels(-100), "seq_lengths": list(row.seq_lengths)}
        for row in packed
    ]
    Dataset.from_list(rows[: STEPS * STEP_ROWS]).save_to_disk(folder.with_suffix(".packed"))
    return folder


def ours(
    model: Path, data: Path, output: Path, world_size: int, rows_a_pass: int = 1
) -> list[dict[str, float]]:
    """Fine-tune with the library; return the speed and the peak memory of each step but the first."""
    config = {
        "model": str(model),
        "train_parameters": {
            "output_dir": str(output),
            "max_seq_len": MAX_TOKENS,
            "epochs": 1,
            "optimizer": {"lr": 1e-6, "weight_decay": 0.0},
            "lr_scheduler_type": "constant",
            "logging_steps": 1000,
            "gradient_accumulation_steps": STEP_ROWS // (world_size * rows_a_pass),
        },
        "dataset": {
            "train_bs": rows_a_pass,
            "eval_bs": 1,
            "train_ds": str(data.with_suffix(".packed")),
            "eval_ds": str(save_one_text(output.with_suffix(".eval"))),
        },
    }
    path = output.with_suffix(".json")
    path.write_text(json.dumps(config))
    script = ROOT / "examples/llama_example_mp.py"
    command = [sys.executable, str(script), "--yaml_path", str(path), "--world_size", str(world_size)]
    peak_bytes = run(command, os.environ.copy())[1]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][1:]
    return [
        {"tokens_per_s": line["train/tokens_per_s"], "peak_bytes": peak_bytes} for line in lines[SKIPPED:]
    ]


def save_one_text(folder: Path) -> Path:
    """Save one short text as a held-out set; nothing reads its loss."""
    from datasets import Dataset

    Dataset.from_list([{"input_ids": [3, 4], "labels": [3, 4]}]).save_to_disk(folder)
    return folder


def theirs(
    model: Path, data: Path, rows: int, num_steps: int, packing: str = "packing"
) -> list[dict[str, float]]:
    """Fine-tune with TRL, ``packing`` or ``padding`` the texts; return the same values as `ours`."""
    script = Path(__file__).with_name("trl_sft.py")
    command = [sys.executable, str(script), str(model), str(data), str(rows), str(num_steps), packing]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}
    output, peak_bytes = run(command, environment)
    speeds = json.loads(output.strip().splitlines()[-1])
    return [{"tokens_per_s": speed, "peak_bytes": peak_bytes} for speed in speeds[SKIPPED:]]


def run(command: list[str], environment: dict[str, str]) -> tuple[str, float]:
    """Run a command; return its output, and the peak bytes of its largest process."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=ROOT
        )
        assert process.stdout is not None
        output = process.stdout.read()
        # The usage covers the process and the children that it has waited for.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        if process.returncode:
            raise RuntimeError(errors.read())
    return output, usage.ru_maxrss << 10


if __name__ == "__main__":
    main()
