"""Print the summary of a checked config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vectorlm.data.settings import SHORT_FORMS, PromptSettings, in_full
from vectorlm.packages import is_installed
from vectorlm.ranks.topology import has_gpu
from vectorlm.rl.environments.environment import AGENT
from vectorlm.runs.config.schema import Config, RLSettings
from vectorlm.runs.config.setting import all_settings
from vectorlm.runs.preflight.checked import CheckedConfig
from vectorlm.runs.preflight.resume import say_finished
from vectorlm.runs.preflight.shared_base import sharing_notes
from vectorlm.train.settings import WITH_CHECKPOINTS
from vectorlm.types import ENVIRONMENT


def summarise(checked: CheckedConfig, world_size: int, num_nodes: int = 1, notes: Sequence[str] = ()) -> str:
    """Return a summary of the run, one aspect per line, followed by the config's notes and `notes`."""
    config, train = checked.config, checked.config.train_parameters
    ranks = f"{world_size}" + (f" on {num_nodes} nodes" if num_nodes > 1 else "")
    on_cpu, on_cuda = map(train.model.dtype_on, (False, True))
    precision = on_cpu if on_cpu == on_cuda else f"{on_cpu} ({on_cuda} on CUDA)"
    rows = {
        "model": config.model
        + (" with LoRA adapters" if train.lora_peft_config is not None else "")
        + (f" of {train.adapters}" if train.adapters is not None and not train.merge_adapters else "")
        + (f" on a base in {train.model.quantization}" if train.model.quantization is not None else ""),
        "ranks": f"{ranks}, {train.model.sharding_strategy}, {precision}"
        + (f", {num} share each pass" if (num := train.model.context_parallel) > 1 else "")
        + (f", {num} split the matrices" if (num := train.model.tensor_parallel) > 1 else "")
        + (f", {num} split the experts" if (num := train.model.expert_parallel) > 1 else ""),
        **(_text_rows(config, world_size) if config.rl is None else _rl_rows(config.rl, train.max_seq_len)),
        "optimizer": f"{train.optimizer.name}, lr {train.optimizer.lr:g}, {train.schedule.lr_scheduler_type}, "
        f"warmup {train.schedule.warmup_ratio:.0%} of the steps",
        "answers" if config.rl is None else "evaluation": _answers_row(config),
        "checkpoints": _checkpoint_row(config),
    }
    if (patience := train.keep.early_stopping_patience) is not None:
        rows["stops early"] = f"after {_count(patience, 'evaluation')} without improvement"
    rows["output"] = train.output_dir
    if (found := checked.resumption) is not None:
        resumes = "; ".join([f"from step {found.step}", *found.changes])
        rows["resumes"] = f"no: {say_finished(config, found)}" if found.is_finished else resumes
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {text}" for name, text in rows.items()]
    return "\n".join(lines + [f"  {'note':<{width}}  {text}" for text in (*notes_of(config), *notes)])


def notes_of(config: Config) -> Iterator[str]:
    """Yield notes if the run differs from the config file."""
    yield from config.notes
    if not is_installed("matplotlib"):
        yield "pictures: none, because matplotlib is not installed. Run `pip install matplotlib`."
    if config.train_parameters.model.use_flash_attention and not has_gpu():
        yield "use_flash_attention: there is no CUDA device, so attention is torch's own (SDPA)"
    train, is_cuda = config.train_parameters, has_gpu()
    # bfloat16 has 8 bits: a change below 1/512 of a weight is rounded away.
    rounds = train.optimizer.arguments.get("bf16_stochastic_round")
    if train.model.dtype == "bfloat16" and train.lora_peft_config is None and not rounds:
        lr = train.optimizer.lr
        yield f"dtype bfloat16: a step of lr {lr:g} cannot move weights above {512 * lr:.2g}; float32 can"
        if train.optimizer.name in ("adamw", "muon") and 1 - train.optimizer.betas[1] < 2**-8:
            yield (
                f"dtype bfloat16: with betas[1]={train.optimizer.betas[1]:g} the average of squared gradients cannot "
                "fall, since what a step takes off is rounded away; betas [0.9, 0.95] let it"
            )
    yield from sharing_notes(config, is_cuda)
    made = config.dataset_preprocess
    if made is not None and made.truncate and made.packing_type in ("full", "partial"):
        yield f"truncate: not used with packing_type {made.packing_type}, which cuts texts into rows and drops nothing"
    dropout = (train.lora_peft_config or {}).get("lora_dropout")
    if dropout and (config.rl is not None or config.examples != "texts"):
        yield f"lora_dropout {dropout:g}: not used; only fine-tuning on texts has dropout"
    if config.rl is not None and config.engine.inference == "vllm":
        trainer = train.model.dtype_on(is_cuda)
        engine = config.engine_dtype(is_cuda).replace("auto", "bfloat16")
        if engine != trainer:
            yield f"engine in {engine}, trainer in {trainer}: their log-probabilities differ (engine.dtype)"


def _text_rows(config: Config, world_size: int) -> dict[str, str]:
    train, data = config.train_parameters, config.text
    num, num_ranks = train.loop.gradient_accumulation_steps, world_size // train.model.ranks_per_share
    evaluation = "none"
    if held_out := ", ".join(data.held_out.values()):
        evaluation = f"on {held_out} every {_count(train.loop.logging_steps, 'optimizer step')}"
    rows = {
        "training": f"{_count(train.loop.epochs, 'epoch')} of {data.train_ds}",
        **({} if config.reward_model is None else {"loss": "of a reward model"}),
        **({} if config.preference is None else {"loss": config.preference.loss}),
        "evaluation": evaluation,
        "global batch": f"{_count(config.rows_per_step(world_size), 'sequence')} of up to {train.max_seq_len} tokens "
        f"({_count(num_ranks, 'rank')} x train_bs {data.train_bs} x accumulation {num})",
    }
    if num > 1:
        every = {"logging_steps": train.loop.logging_steps} if held_out else {}
        if config.has_engine and (frequency := config.evaluation.every) is not None:
            every["evaluation.every"] = frequency
        there = ", ".join(f"{name}: {max(1, round(steps / num))}" for name, steps in every.items())
        if every:
            rows["micro-batches"] = (
                f"{num} in an optimizer step. Intervals count optimizer steps. If yours are still from VectorLM, "
                f"which counted micro-batches, write {there}; once converted, keep them"
            )
    return rows


def _rl_rows(rl: RLSettings, max_seq_len: int) -> dict[str, str]:
    collect, update, teacher = rl.collect, rl.update, rl.teacher
    weights = {**rl.reward.rewards, **rl.reward.reward_models}
    for name, source in rl.collect.sources.items():
        weights |= {f"{name}: {reward}": weight for reward, weight in source.rewards.items()}
    environments = {
        name: source.environment for name, source in rl.by_source.items() if source.environment is not None
    }
    if environments:
        weights[ENVIRONMENT] = 1.0
    prompts = " and ".join(
        (f"{source.weight:.0%} " if name else "") + _prompts(source.prompts)
        for name, source in rl.by_source.items()
    )
    completions = collect.prompts_per_step * collect.group_size
    rows = {
        "training": f"{rl.algorithm.name}, {_count(rl.num_steps, 'step')} on {prompts}",
        "rollouts": f"{_count(completions, 'completion')} a step ({_count(collect.prompts_per_step, 'prompt')} x group "
        f"{collect.group_size}), up to {max_seq_len} tokens with their prompts",
        "rewards": ", ".join(f"{name} x {weight:g}" for name, weight in weights.items()) or "none",
    }
    if environments:
        labels = [
            f"{name}: {environment}" if name else environment for name, environment in environments.items()
        ]
        has_turns = any(not environment.startswith(AGENT) for environment in environments.values())
        rows["environment"] = ", ".join(labels) + (
            f", up to {_count(collect.max_turns, 'turn')} a rollout" if has_turns else ""
        )
    if teacher is not None:
        how = "sampled tokens" if teacher.kind == "sampled" else f"whole distributions, beta {teacher.beta:g}"
        rows["teacher"] = f"{teacher.model or teacher.server} x {teacher.coef:g}, by {how}"
    if (sft := rl.sft) is not None:
        end = "" if sft.share_at_end is None else f" to {sft.share_at_end:.0%}"
        rows["texts"] = (
            f"{_count(sft.rows_per_step, 'row')} of {sft.dataset} a step, {sft.share:.0%}{end} of the loss"
        )
    rows["updates"] = (
        f"{_count(update.steps_per_batch, 'optimizer step')} a step "
        f"({_count(update.num_epochs, 'epoch')} x {_count(update.num_mini_batches, 'mini-batch', 'mini-batches')})"
    )
    return rows


def _checkpoint_row(config: Config) -> str:
    every, keep = config.train_parameters.loop.save_frequency, config.train_parameters.keep
    if not config.train_parameters.checkpointing_enabled:
        known = all_settings().items()
        is_set = any(
            WITH_CHECKPOINTS in setting.read_if and path in config.origins for path, setting in known
        )
        return "off (checkpointing_enabled)" + ("; their settings are not read" if is_set else "")
    if config.rl is not None or every > 1:
        text = f"every {_count(round(every) if config.rl is None else config.rl.save_every, 'step')}"
    else:
        text = "every epoch" if every == 1 else f"every {every:g} of an epoch"
    if keep.keep_best:
        return f"{text}; the newest {keep.keep_checkpoints} stay, and the best"
    return text if keep.keep_checkpoints == 2 else f"{text}; the newest {keep.keep_checkpoints} stay"


def _answers_row(config: Config) -> str:
    evaluation = config.evaluation
    sources = {} if config.rl is None else config.rl.by_source
    asked = [
        prompts
        for prompts in (evaluation.prompts, *(source.held_out for source in sources.values()))
        if prompts is not None
    ]
    if not asked:
        return "none (set evaluation.prompts)"
    reward = f", scored by {', '.join(config.evaluation_rewards)}" if config.evaluation_rewards else ""
    every, step = evaluation.every, "optimizer step" if config.rl is None else "step"
    when = "before and after training" if every is None else f"every {_count(every, step)}"
    return f"{', '.join(map(_prompts, asked))} {when}{reward}, into {config.samples_path}"


def _prompts(source: str | tuple[str, ...] | PromptSettings) -> str:
    source = in_full(source)
    if not isinstance(source, PromptSettings):
        return _count(len(source), "prompt")
    tasks = (f"{kind}:{name}" for kind in SHORT_FORMS if (name := getattr(source, kind)) is not None)
    return f"the prompts of {source.path or next(tasks)}"


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
