"""A resolved config in a few lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from vectorlm.config.schema import Config, RLSettings, TrainSettings
from vectorlm.packages import is_installed
from vectorlm.preflight.checked import CheckedConfig
from vectorlm.preflight.resume import say_finished
from vectorlm.ranks.topology import has_gpu
from vectorlm.train.settings import ModelSettings


def summarise(checked: CheckedConfig, world_size: int, num_nodes: int = 1) -> str:
    """Return what the run will do, one aspect a line."""
    config, train = checked.config, checked.config.train_parameters
    ranks = f"{world_size}" + (f" on {num_nodes} nodes" if num_nodes > 1 else "")
    rows = {
        "model": config.model + (" with LoRA adapters" if train.lora_peft_config is not None else ""),
        "ranks": f"{ranks}, {train.model.sharding_strategy}, {_precision(train.model)}",
        **(_text_rows(config, world_size) if config.rl is None else _rl_rows(config.rl, train)),
        "optimizer": f"AdamW, lr {train.optimizer.lr:g}, {train.schedule.lr_scheduler_type}, "
        f"warmup {train.schedule.warmup_ratio:.0%} of the steps",
        "sampler": _sampler_row(config),
        "checkpoints": _checkpoint_row(config),
        **_early_stop_row(train),
        "output": train.output_dir,
        **_resumption_row(checked),
    }
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {text}" for name, text in rows.items()]
    return "\n".join(lines + [f"  {'note':<{width}}  {text}" for text in notes_of(config)])


def notes_of(config: Config) -> Iterator[str]:
    """Yield what the run does in another way than the file says."""
    yield from config.notes
    if not is_installed("matplotlib"):
        yield "pictures: none, for the package matplotlib is not installed. Run `pip install matplotlib`."
    train = config.train_parameters
    if train.model.use_flash_attention and not has_gpu():
        yield "use_flash_attention: there is no CUDA device, so attention is torch's own (SDPA)"


def _micro_batch_row(train: TrainSettings) -> dict[str, str]:
    """Say how often things happen in micro-batches, which VectorLM counted."""
    num, every = train.loop.gradient_accumulation_steps, {"logging_steps": train.loop.logging_steps}
    if train.sampler is not None and (frequency := train.sampler.evaluation.sample_frequency) is not None:
        every["sample_frequency"] = frequency
    if num == 1:
        return {}
    here = ", ".join(f"{name} {steps} is every {steps * num}" for name, steps in every.items())
    there = ", ".join(f"{name} every {steps / num:g}" for name, steps in every.items())
    vectorlm = f"VectorLM counted these, which in optimizer steps is {there}"
    return {"micro-batches": f"{num} in an optimizer step: {here}. {vectorlm}"}


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
        "training": f"{_count(train.loop.epochs, 'epoch')} of {data.train_ds}",
        "evaluation": f"on {data.eval_ds} every {_count(train.loop.logging_steps, 'optimizer step')}",
        "global batch": f"{_count(batch, 'sequence')} of up to {train.max_seq_len} tokens "
        f"({parts} x accumulation {train.loop.gradient_accumulation_steps})",
        **_micro_batch_row(train),
    }


def _rl_rows(rl: RLSettings, train: TrainSettings) -> dict[str, str]:
    collect, update, reward = rl.collect, rl.update, rl.reward
    is_file = isinstance(collect.prompts, str)
    source = f"the prompts of {collect.prompts}" if is_file else _count(len(collect.prompts), "prompt")
    weights = {**reward.rewards, **reward.reward_models}
    completions = collect.prompts_per_step * collect.group_size
    return {
        "training": f"{rl.algorithm}, {_count(rl.max_steps, 'step')} on {source}",
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
    every, keep = config.train_parameters.loop.save_frequency, config.train_parameters.keep
    if config.rl is not None or every > 1:
        text = f"every {_count(round(every) if config.rl is None else config.rl.save_every, 'step')}"
    else:
        text = "every epoch" if every == 1 else f"every {every:g} of an epoch"
    if keep.keep_best:
        return f"{text}; the newest {keep.keep_checkpoints} stay, and the best"
    return text if keep.keep_checkpoints == 2 else f"{text}; the newest {keep.keep_checkpoints} stay"


def _early_stop_row(train: TrainSettings) -> dict[str, str]:
    patience = train.keep.early_stopping_patience
    if patience is None:
        return {}
    return {"stops early": f"after {_count(patience, 'evaluation')} without improvement"}


def _resumption_row(checked: CheckedConfig) -> dict[str, str]:
    found = checked.resumption
    if found is None:
        return {}
    if found.is_finished:
        return {"goes on": f"no: {say_finished(checked.config, found)}"}
    return {"goes on": "; ".join([f"from step {found.step}", *found.changes])}


def _sampler_row(config: Config) -> str:
    train = config.train_parameters
    if (sampler := train.sampler) is None:
        return "none"
    evaluation = sampler.evaluation
    if evaluation.prompts is None:
        return "rollouts alone, without an evaluation"
    is_file = isinstance(evaluation.prompts, str)
    prompts = f"the prompts of {evaluation.prompts}" if is_file else _count(len(evaluation.prompts), "prompt")
    reward = f", scored by {evaluation.reward}" if evaluation.reward else ""
    every = evaluation.sample_frequency
    step = "optimizer step" if config.rl is None else "step"
    when = "before and after training" if every is None else f"every {_count(every, step)}"
    return f"{prompts} {when}{reward}, into {train.samples_path}"


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
