"""Train with TRL's SFTTrainer, for sft.py and real.py; print the tokens per second of each step."""

from __future__ import annotations

import json
import sys
import tempfile
import time

from sft import MAX_TOKENS, STEP_ROWS


def main() -> None:
    """Train, and print the speeds."""
    from datasets import load_from_disk
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    model, data, rows, num_steps, packing = sys.argv[1:]
    tokens: list[int] = []
    times: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            times.append((time.perf_counter(), 0.0))
            tokens.append(0)

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            times[-1] = (times[-1][0], time.perf_counter())

    class Counting(SFTTrainer):
        def compute_loss(self, model: object, inputs: dict, *args: object, **kwargs: object) -> object:
            mask = inputs.get("attention_mask")
            tokens[-1] += int(inputs["input_ids"].numel() if mask is None else mask.sum())
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        packing=packing == "packing",
        max_length=MAX_TOKENS,
        per_device_train_batch_size=int(rows),
        gradient_accumulation_steps=STEP_ROWS // int(rows),
        max_steps=int(num_steps),
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Counting(
        model=model,
        args=settings,
        train_dataset=load_from_disk(data).select_columns(["input_ids"]),
        callbacks=[Clock()],
    )
    trainer.train()
    print(json.dumps([count / (end - start) for count, (start, end) in zip(tokens, times, strict=True)]))


if __name__ == "__main__":
    main()
