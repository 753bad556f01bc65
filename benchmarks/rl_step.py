"""One GRPO step beside TRL's GRPOTrainer with vLLM in the same process. Run: python benchmarks/rl_step.py

Both train the same 36 M parameter Llama on the same prompts: 16 of 32 tokens, 8 completions of 64 tokens each, one
optimizer step per batch, no reference model. Needs TRL: pip install --no-deps -r requirements/bench.txt
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

from bench_model import save_bench_model
from report import ROOT, write_result

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS, STEPS, SKIPPED = 16, 8, 32, 64, 8, 2
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


def ours(model: Path, prompts: Path, output: Path, world_size: int) -> list[dict[str, float]]:
    """Train with the library; return the metrics of every step."""
    config = {
        "model": str(model),
        "train_parameters": {
            "output_dir": str(output),
            "max_seq_len": PROMPT_TOKENS + NEW_TOKENS,
            "optimizer": {"lr": 1e-6, "weight_decay": 0.0},
            "lr_scheduler_type": "constant",
            "sampler": {
                "sample_frequency": 1000,
                "prompts": ["3 4 5"],
                "vllm_dtype": "float32",
                "sampling_params": {"max_tokens": 1},
                "engine": {"max_model_len": 128, "kv_cache_memory_bytes": 256 << 20},
            },
        },
        "rl": {
            "algorithm": "grpo",
            "max_steps": STEPS,
            "prompts": str(prompts),
            "prompts_per_step": PROMPTS,
            "group_size": GROUP,
            "sampling_params": {"max_tokens": NEW_TOKENS, "ignore_eos": True},
            "rewards": {f"{REWARD}:even": 1.0},
            "max_tokens_per_micro_batch": 16 * (PROMPT_TOKENS + NEW_TOKENS),
            "show_every": 0,
        },
    }
    path = output.with_suffix(".json")
    path.write_text(json.dumps(config))
    script = ROOT / "examples/rl_example_mp.py"
    command = [sys.executable, str(script), "--yaml_path", str(path), "--world_size", str(world_size)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][1:]


def theirs(model: Path, prompts: Path) -> list[float]:
    """Train with TRL in a process of its own; return the seconds of every step."""
    command = [sys.executable, str(Path(__file__).with_name("trl_grpo.py")), str(model), str(prompts)]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(run.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure, print and save."""
    with tempfile.TemporaryDirectory() as scratch:
        model, prompts = save_prompts(Path(scratch))
        steps = {size: ours(model, prompts, Path(scratch) / f"ours{size}", size)[SKIPPED:] for size in (1, 2)}
        trl = statistics.median(theirs(model, prompts)[SKIPPED:])
    rows = [{"what": "TRL, one process", "s a step": round(trl, 2), "TRL / this": 1.0}]
    for size, lines in steps.items():
        medians = {
            name: statistics.median(line[f"time/{name}_s"] for line in lines) for name in ("step", *PARTS)
        }
        parts = {f"{name}, s": round(medians[name], 3) for name in PARTS}
        whole = medians["step"]
        rows.append(
            {"what": f"vectorlm, {size} ranks" if size > 1 else "vectorlm, one rank"}
            | {"s a step": round(whole, 2), "TRL / this": round(trl / whole, 2)}
            | parts
        )
    setting = {"prompts": PROMPTS, "group": GROUP, "new_tokens": NEW_TOKENS, "steps": STEPS - SKIPPED}
    write_result("rl_step", setting, rows[1:] + rows[:1])


if __name__ == "__main__":
    main()
