"""A resolved config in a few lines for people."""

from __future__ import annotations

from vectorlm.config.schema import Config, SamplerSettings, TrainSettings


def summarise(config: Config, world_size: int, num_nodes: int = 1) -> str:
    """Return what the run will do, one aspect a line."""
    train, data = config.train_parameters, config.dataset
    batch = world_size * data.train_bs * train.gradient_accumulation_steps
    ranks = f"{world_size}" + (f" on {num_nodes} nodes" if num_nodes > 1 else "")
    parts = f"{_count(world_size, 'rank')} x train_bs {data.train_bs}"
    rows = {
        "model": config.model + (" with LoRA adapters" if train.lora_peft_config is not None else ""),
        "ranks": f"{ranks}, {train.sharding_strategy}, {'bfloat16' if train.use_mp else 'float32'}",
        "training": f"{_count(train.epochs, 'epoch')} of {data.train_ds}, evaluated on {data.eval_ds}",
        "global batch": f"{_count(batch, 'sequence')} of up to {train.max_seq_len} tokens "
        f"({parts} x accumulation {train.gradient_accumulation_steps})",
        "optimizer": f"AdamW, lr {train.optimizer.lr:g}, {train.lr_scheduler_type}, "
        f"warmup {train.warmup_ratio:.0%} of the steps",
        "sampler": _sampler_row(train.sampler, train),
        "checkpoints": f"every {train.save_frequency:g} epoch" if train.checkpointing_enabled else "none",
        "output": train.output_dir,
    }
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())


def _sampler_row(sampler: SamplerSettings | None, train: TrainSettings) -> str:
    if sampler is None:
        return "none"
    if isinstance(sampler.prompts, str):
        prompts = f"the prompts of {sampler.prompts}"
    else:
        prompts = _count(len(sampler.prompts), "prompt")
    reward = f", scored by {sampler.reward}" if sampler.reward else ""
    return f"{prompts} every {_count(sampler.sample_frequency, 'step')}{reward}, into {train.samples_path}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
