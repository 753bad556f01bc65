"""TRL's GRPOTrainer with vLLM in its process, for rl_step.py: prints the seconds of each step, and its tokens.

TRL writes each tensor into the running vLLM by `load_weights`. On CPU vLLM gives linear weights to oneDNN when it loads
and could not take new ones; with plain weights it can, so that is what it gets here.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

from even_reward import even
from rl_step import GROUP, LENGTHS, PROMPTS, ROWS_PER_PASS, STEPS


def main() -> None:
    """Train, and print."""
    from vectorlm.backends.vllm.pack import keep_plain_weights

    keep_plain_weights()
    import trl.generation.vllm_generation as generation
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from vllm import LLM

    # TRL has no setting for it; compiled, vLLM would need a C++ compiler. The library's engine runs eagerly too.
    generation.LLM = partial(LLM, enforce_eager=True)

    model, prompts, lengths = sys.argv[1:]
    sampling = dict(LENGTHS[lengths])
    starts: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            starts.append(time.perf_counter())

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.perf_counter())

    ends: list[float] = []
    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=192,
        per_device_train_batch_size=ROWS_PER_PASS,
        gradient_accumulation_steps=PROMPTS * GROUP // ROWS_PER_PASS,
        num_generations=GROUP,
        max_completion_length=sampling.pop("max_tokens"),
        generation_kwargs=sampling,
        max_steps=STEPS,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        vllm_importance_sampling_correction=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

    def reward(completions: list[str], **columns: object) -> list[float]:
        return [even(text) for text in completions]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    tokens = [line["completions/mean_length"] for line in trainer.state.log_history if "reward" in line]
    lines = [
        {"step_s": end - start, "tokens": float(mean)}
        for start, end, mean in zip(starts, ends, tokens, strict=True)
    ]
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
