"""Train with TRL's GRPOTrainer and vLLM in one process, for rl_step.py; print times, tokens and memory of each step.

TRL lacks settings that vLLM needs on CPU to sample as the library does, and this file makes them: fp32 (vLLM would take
16 bits, which most processors only emulate), eager execution, and writable weights. vLLM packs linear weights for
oneDNN when it loads and would not use new ones; this file packs them again after each update.
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

from even_reward import even, peak_bytes, watch_memory


def main() -> None:
    """Train, and print the measurements."""
    from vectorlm.sampling.backends.vllm.pack import keep_plain_weights, pack

    keep_plain_weights()
    import trl.generation.vllm_generation as generation
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from vllm import LLM

    # Compilation needs a C++ compiler. The library's engine runs eagerly too.
    generation.LLM = partial(LLM, enforce_eager=True, dtype="float32")

    model, prompts, arguments = sys.argv[1:]
    asked = json.loads(arguments)
    setting, sampling = asked["setting"], dict(asked["sampling"])
    steps: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            steps.append({"start": time.perf_counter()})

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            steps[-1] |= {"end": time.perf_counter(), "peak_bytes": peak_bytes()}

    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    num_rows = setting["prompts"] * setting["group"]
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=setting["prompt_tokens"] + setting["new_tokens"],
        per_device_train_batch_size=asked["rows"],
        gradient_accumulation_steps=num_rows // asked["rows"],
        num_generations=setting["group"],
        max_completion_length=sampling.pop("max_tokens"),
        generation_kwargs=sampling,
        max_steps=asked["steps"],
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
        steps[-1]["sampled"] = time.perf_counter()
        watch_memory()
        return even(completions)

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    engine = trainer.vllm_generation
    write = engine.sync_weights

    def write_and_pack() -> None:
        write()
        pack(engine.llm.llm_engine.model_executor.driver_worker.model_runner.model)

    engine.sync_weights = write_and_pack
    trainer.train()
    tokens = [line["completions/mean_length"] for line in trainer.state.log_history if "reward" in line]
    lines = [
        {
            "step_s": step["end"] - step["start"],
            "update_s": step["end"] - step["sampled"],
            "generate_s": step["sampled"] - step["start"],
            "tokens": float(mean),
            "peak_bytes": step["peak_bytes"],
        }
        for step, mean in zip(steps, tokens, strict=True)
    ]
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
