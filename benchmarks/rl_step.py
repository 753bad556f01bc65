"""One GRPO step beside TRL's GRPOTrainer with vLLM in the same process. Run: python benchmarks/rl_step.py

Both train the same 36 M parameter Llama on the same prompts, 8 a step of 32 tokens each, 8 completions of each, one
optimizer step per batch, no reference model. Completions either end at one of 200 tokens in 8000, so that most are
short and a few reach 128, or all have 64. Needs TRL: pip install --no-deps -r requirements/bench.txt
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_model import save_bench_model
from report import ROOT, write_result

PROMPTS, GROUP, PROMPT_TOKENS, STEPS, SKIPPED = 8, 8, 32, 5, 1
ROWS_PER_PASS = 16
LENGTHS: dict[str, dict[str, Any]] = {
    "long tail": {"max_tokens": 128, "stop_token_ids": list(range(3, 203))},
    "equal": {"max_tokens": 64, "ignore_eos": True},
}
REWARD = Path(__file__).with_name("even_reward.py")
PARTS = ("publish", "generate", "score", "assess", "update")


def save_prompts(folder: Path) -> tuple[Path, Path]:
    """Save the model with a tokenizer of numbers, and prompts whose tokens are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = save_bench_model(folder / "model")
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {str(number): number for number in range(3, 8000)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(model)
    generator = random.Random(0)
    rows = [
        {"prompt": " ".join(str(generator.randrange(3, 8000)) for _ in range(PROMPT_TOKENS))}
        for _ in range(PROMPTS * (STEPS + 2))
    ]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model, path


def ours(model: Path, prompts: Path, output: Path, lengths: str, world_size: int) -> list[dict[str, float]]:
    """Train with the library; return the metrics of every step."""
    longest = PROMPT_TOKENS + LENGTHS[lengths]["max_tokens"]
    config = {
        "model": str(model),
        "train_parameters": {
            "output_dir": str(output),
            "max_seq_len": longest,
            "optimizer": {"lr": 1e-6, "weight_decay": 0.0},
            "lr_scheduler_type": "constant",
            "sampler": {
                "sample_frequency": 1000,
                "prompts": ["3 4 5"],
                "vllm_dtype": "float32",
                "sampling_params": {"max_tokens": 1},
                "engine": {"max_model_len": longest, "kv_cache_memory_bytes": 256 << 20},
            },
        },
        "rl": {
            "algorithm": "grpo",
            "max_steps": STEPS,
            "prompts": str(prompts),
            "prompts_per_step": PROMPTS,
            "group_size": GROUP,
            "sampling_params": LENGTHS[lengths],
            "rewards": {f"{REWARD}:even": 1.0},
            "max_tokens_per_micro_batch": ROWS_PER_PASS * longest,
            "show_every": 0,
        },
    }
    path = output.with_suffix(".json")
    path.write_text(json.dumps(config))
    script = ROOT / "examples/rl_example_mp.py"
    command = [sys.executable, str(script), "--yaml_path", str(path), "--world_size", str(world_size)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][1:]


def theirs(model: Path, prompts: Path, lengths: str) -> list[dict[str, float]]:
    """Train with TRL in a process of its own; return the seconds of every step, and the tokens of a completion."""
    script = Path(__file__).with_name("trl_grpo.py")
    command = [sys.executable, str(script), str(model), str(prompts), lengths]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(run.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure, print and save."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model, prompts = save_prompts(Path(scratch))
        for lengths in LENGTHS:
            lines = theirs(model, prompts, lengths)[SKIPPED:]
            trl = statistics.median(line["step_s"] for line in lines)
            tokens = statistics.fmean(line["tokens"] for line in lines)
            baseline = _row(lengths, "TRL, one process", trl, trl, tokens) | {
                f"{name}, s": "" for name in PARTS
            }
            for size in (1, 2):
                output = Path(scratch) / f"{lengths.replace(' ', '_')}_{size}"
                measured = ours(model, prompts, output, lengths, size)[SKIPPED:]
                medians = {
                    name: statistics.median(line[f"time/{name}_s"] for line in measured)
                    for name in ("step", *PARTS)
                }
                tokens = statistics.fmean(line["completion/length_mean"] for line in measured)
                who = f"vectorlm, {size} ranks" if size > 1 else "vectorlm, one rank"
                row = _row(lengths, who, medians["step"], trl, tokens)
                rows.append(row | {f"{name}, s": f"{medians[name]:.2f}" for name in PARTS})
            rows.append(baseline)
    setting = {"prompts": PROMPTS, "group": GROUP, "prompt_tokens": PROMPT_TOKENS, "steps": STEPS - SKIPPED}
    write_result("rl_step", setting, rows)


def _row(lengths: str, who: str, step_s: float, trl_s: float, tokens: float) -> dict[str, Any]:
    return {
        "": who,
        "lengths": lengths,
        "tokens a completion": f"{tokens:.1f}",
        "s a step": f"{step_s:.1f}",
        "times faster than TRL": f"{trl_s / step_s:.2f}",
    }


if __name__ == "__main__":
    main()
