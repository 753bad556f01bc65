"""A resolved config in a few lines for people."""

from __future__ import annotations

from vectorlm.config.check_packages import NO_PICTURES, is_installed
from vectorlm.config.resume import find_resumption, say_finished
from vectorlm.config.schema import Config, RLSettings, SamplerSettings, TrainSettings
from vectorlm.train.settings import ModelSettings


def summarise(config: Config, world_size: int, num_nodes: int = 1) -> str:
    """Return what the run will do, one aspect a line."""
    train = config.train_parameters
    ranks = f"{world_size}" + (f" on {num_nodes} nodes" if num_nodes > 1 else "")
    rows = {
        "model": config.model + (" with LoRA adapters" if train.lora_peft_config is not None else ""),
        "ranks": f"{ranks}, {train.model.sharding_strategy}, {_precision(train.model)}",
        **(_text_rows(config, world_size) if config.rl is None else _rl_rows(config.rl, train)),
        "optimizer": f"AdamW, lr {train.optimizer.lr:g}, {train.schedule.lr_scheduler_type}, "
        f"warmup {train.schedule.warmup_ratio:.0%} of the steps",
        "sampler": _sampler_row(train.sampler, train),
        "checkpoints": _checkpoint_row(config),
        "output": train.output_dir,
        **({} if is_installed("matplotlib") else {"pictures": NO_PICTURES}),
        **_resumption_row(config, world_size),
    }
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())


def _precision(settings: ModelSettings) -> str:
    on_cpu, on_cuda = (
        "bfloat16" if settings.computes_in_bf16(is_cuda) else "float32" for is_cuda in (False, True)
    )
    return on_cpu if on_cpu == on_cuda else f"{on_cpu} ({on_cuda} on CUDA)"


def _text_rows(config: Config, world_size: int) -> dict[str, str]:
    train, data = config.train_parameters, config.text
    batch = world_size * data.train_bs * train.loop.gradient_accumulation_steps
    parts = f"{_count(world_size, 'rank')} x train_bs {data.train_bs}"
    return {
        "training": f"{_count(train.loop.epochs, 'epoch')} of {data.train_ds}, evaluated on {data.eval_ds}",
        "global batch": f"{_count(batch, 'sequence')} of up to {train.max_seq_len} tokens "
        f"({parts} x accumulation {train.loop.gradient_accumulation_steps})",
    }


def _rl_rows(rl: RLSettings, train: TrainSettings) -> dict[str, str]:
    collect, update, reward = rl.collect, rl.update, rl.reward
    source = collect.prompts if isinstance(collect.prompts, str) else _count(len(collect.prompts), "prompt")
    weights = {**reward.rewards, **reward.reward_models}
    completions = collect.prompts_per_step * collect.group_size
    return {
        "training": f"{rl.algorithm}, {_count(rl.max_steps, 'step')} on the prompts of {source}",
        "rollouts": f"{_count(completions, 'completion')} a step ({_count(collect.prompts_per_step, 'prompt')} x group "
        f"{collect.group_size}), up to {train.max_seq_len} tokens with their prompts",
        "rewards": ", ".join(f"{name} x {weight:g}" for name, weight in weights.items()) or "none",
        **_teacher_row(rl),
        "updates": f"{_count(update.num_epochs * update.num_mini_batches, 'optimizer step')} a step "
        f"({_count(update.num_epochs, 'epoch')} x {_count(update.num_mini_batches, 'mini-batch', 'mini-batches')})",
    }


def _teacher_row(rl: RLSettings) -> dict[str, str]:
    teacher = rl.teacher
    if teacher is None:
        return {}
    how = "sampled tokens" if teacher.kind == "sampled" else f"whole distributions, beta {teacher.beta:g}"
    return {"teacher": f"{teacher.model or teacher.server} x {teacher.coef:g}, by {how}"}


def _checkpoint_row(config: Config) -> str:
    if not config.train_parameters.checkpointing_enabled:
        return "none"
    if config.rl is not None:
        return f"every {_count(config.rl.save_every, 'step')}"
    return f"every {config.train_parameters.loop.save_frequency:g} epoch"


def _resumption_row(config: Config, world_size: int) -> dict[str, str]:
    found = find_resumption(config, world_size)
    if found is None:
        return {}
    if found.is_finished:
        return {"goes on": f"no: {say_finished(config, found)}"}
    return {"goes on": "; ".join([f"from step {found.step}", *found.changes])}


def _sampler_row(sampler: SamplerSettings | None, train: TrainSettings) -> str:
    if sampler is None:
        return "none"
    evaluation = sampler.evaluation
    is_file = isinstance(evaluation.prompts, str)
    prompts = f"the prompts of {evaluation.prompts}" if is_file else _count(len(evaluation.prompts), "prompt")
    reward = f", scored by {evaluation.reward}" if evaluation.reward else ""
    return f"{prompts} every {_count(evaluation.sample_frequency, 'step')}{reward}, into {train.samples_path}"


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
