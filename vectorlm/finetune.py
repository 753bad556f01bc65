"""A whole fine-tuning run, from its config to the final model."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import set_seed
from transformers.utils.logging import disable_progress_bar

from vectorlm.checkpoint.export import export_model
from vectorlm.checkpoint.shared import require_shared
from vectorlm.checkpoint.state import CheckpointStore
from vectorlm.config import Config, save_config
from vectorlm.config.lora import engine_arguments, refused_options
from vectorlm.data.loader import StepLoader, load_dataset
from vectorlm.errors import ConfigError
from vectorlm.exam import Exam, read_questions
from vectorlm.handover import DeviceTurn, lay_down
from vectorlm.memory.from_config import memory_report
from vectorlm.model.load import load_empty_model, load_model, load_tokenizer
from vectorlm.model.lora import add_lora
from vectorlm.model.schedule import Schedule
from vectorlm.model.shard import fill_from_main, shard_model
from vectorlm.ranks.group import process_group
from vectorlm.ranks.topology import Topology
from vectorlm.rewards.registry import get_reward
from vectorlm.telemetry.metrics import FanOut, JsonlSink, MetricSink, ProgressSink, WandbSink
from vectorlm.telemetry.plots import plot_run
from vectorlm.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vectorlm.sampling.engine import SamplingEngine
    from vectorlm.types import Engine


def finetune(config: Config, topology: Topology | None = None) -> None:
    """Train as `config` says and leave everything in its ``output_dir``; called on every rank.

    The folder then holds ``final-model``, ``metrics.jsonl``, ``samples.jsonl``, ``run.png``, ``config.yaml``
    and, with checkpointing, ``checkpoints``. A run that was killed goes on from its latest checkpoint.

    Args:
        config: The whole run.
        topology: This rank's place, read from the environment when None.

    Raises:
        ConfigError: The config cannot be carried out, or needs more memory than there is.
        CheckpointError: The checkpoints in ``output_dir`` are those of another run, or a node does not see them.
        NonFiniteLoss: Training diverged.
    """
    topology = topology or Topology.from_environment()
    settings = config.train_parameters
    _say_memory(config, topology)
    # The run has one progress bar, its own.
    disable_progress_bar()
    with ExitStack() as stack:
        stack.enter_context(process_group(topology))
        # First of all: the engine loads in its own process while the ranks load the model.
        engine = _open_engine(config, topology, stack)
        if topology.is_cuda and engine is not None:
            # vLLM sizes its cache by the memory that is free, so the trainer takes its own afterwards.
            engine.wait_until_ready()
            if settings.sampler is not None:
                lay_down(engine, settings.sampler.sleep)
        tokenizer = load_tokenizer(config.model)
        trainer, resume_step = _build(config, topology, tokenizer, engine, stack)
        trainer.run(resume_step)
        output = Path(settings.output_dir)
        export_model(trainer.model, tokenizer, output / "final-model")
    if topology.is_main:
        plot_run(output / "metrics.jsonl", output / "run.png")


def _say_memory(config: Config, topology: Topology) -> None:
    total = torch.cuda.get_device_properties(topology.device).total_memory if topology.is_cuda else None
    near = topology.local_world_size
    report = memory_report(config, topology.world_size, device_bytes=total, ranks_per_node=near)
    if topology.is_main:
        print(report, file=sys.stderr, flush=True)


def _open_engine(config: Config, topology: Topology, stack: ExitStack) -> SamplingEngine | None:
    sampler = config.train_parameters.sampler
    if sampler is None:
        return None
    from vectorlm.sampling.engine import SamplingEngine

    output = Path(config.train_parameters.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    engine_args = {
        "dtype": sampler.vllm_dtype,
        "gpu_memory_utilization": sampler.gpu_memory_utilization,
        "enable_sleep_mode": sampler.sleep != "none",
        **_lora_arguments(config),
        **sampler.engine,
    }
    return stack.enter_context(
        SamplingEngine(
            config.model,
            topology=topology,
            sampling_params=dict(sampler.sampling_params),
            receiver=sampler.receiver,
            lora_mode="auto" if config.train_parameters.lora_peft_config is None else sampler.lora_mode,
            verify_updates=sampler.verify_updates,
            timeout_s=sampler.timeout_s,
            log_path=output / "sampler.log",
            **engine_args,
        )
    )


def _lora_arguments(config: Config) -> dict[str, Any]:
    """Return what the engine needs to compute with the run's adapters itself; nothing where it does not."""
    sampler, options = config.train_parameters.sampler, config.train_parameters.lora_peft_config
    if sampler is None or options is None:
        return {}
    for option, value, rule, fix in refused_options(options, sampler.lora_mode):
        raise ConfigError(f"train_parameters.lora_peft_config.{option}={value!r} {rule}. {fix}")
    return engine_arguments(options) if sampler.lora_mode == "adapter" else {}


def _build(
    config: Config,
    topology: Topology,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine | None,
    stack: ExitStack,
) -> tuple[Trainer, int | None]:
    settings = config.train_parameters
    train_loader = _loader(config, topology, tokenizer, is_training=True)
    eval_loader = _loader(config, topology, tokenizer, is_training=False)
    num_steps = settings.epochs * len(train_loader)
    model = _sharded_model(config, topology)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, **asdict(settings.optimizer))
    schedule = Schedule(
        settings.lr_scheduler_type,
        optimizer,
        num_warmup_steps=math.ceil(settings.warmup_ratio * num_steps),
        num_steps=num_steps,
    )
    store = _store(config, topology, num_steps) if settings.checkpointing_enabled else None
    resume_step = store.latest_step() if store else None
    sink, say = _sinks(config, topology, num_steps, resume_step, stack)
    if resume_step is not None:
        say(f"resuming {settings.output_dir} from step {resume_step}; delete its checkpoints to start anew")
    trainer = Trainer(
        model,
        optimizer,
        schedule,
        train_loader,
        eval_loader,
        topology=topology,
        sink=sink,
        num_epochs=settings.epochs,
        eval_every=settings.logging_steps,
        max_grad_norm=settings.max_grad_norm,
        ignore_index=config.dataset.ignore_index,
        exam=_exam(config, topology, engine, model, optimizer, resume_step, say),
        exam_every=settings.sampler.sample_frequency if settings.sampler else 1,
        store=store,
        save_every=max(1, round(settings.save_frequency * len(train_loader))),
    )
    return trainer, resume_step


def _loader(
    config: Config, topology: Topology, tokenizer: PreTrainedTokenizerBase, *, is_training: bool
) -> StepLoader:
    settings, dataset = config.train_parameters, config.dataset
    return StepLoader(
        load_dataset(dataset.train_ds if is_training else dataset.eval_ds),
        micro_batch_size=dataset.train_bs if is_training else dataset.eval_bs,
        num_micro_batches=settings.gradient_accumulation_steps if is_training else 1,
        rank=topology.rank,
        world_size=topology.world_size,
        seed=settings.seed,
        shuffle=is_training,
        pad_token_id=tokenizer.pad_token_id or 0,
        ignore_index=dataset.ignore_index,
        max_seq_len=settings.max_seq_len,
    )


def _sharded_model(config: Config, topology: Topology) -> nn.Module:
    """Load, adapt and shard the model; afterwards every rank draws its own random numbers."""
    settings = config.train_parameters
    set_seed(settings.seed)
    is_empty = settings.low_cpu_mem_usage and not topology.is_main
    load = load_empty_model if is_empty else load_model
    model: Any = load(config.model, flash_attention=settings.use_flash_attention)
    if settings.lora_peft_config is not None:
        model = add_lora(model, settings.lora_peft_config)
    weights = model.state_dict() if settings.low_cpu_mem_usage and topology.is_main else {}
    shard_model(
        model,
        topology,
        strategy=settings.sharding_strategy,
        mixed_precision=settings.use_mp,
        activation_checkpointing=settings.use_activation_checkpointing,
    )
    if settings.low_cpu_mem_usage:
        fill_from_main(model, weights, topology.device)
    set_seed((settings.seed + topology.rank) % 2**32)
    return model


def _store(config: Config, topology: Topology, num_steps: int) -> CheckpointStore:
    settings, dataset = config.train_parameters, config.dataset
    require_shared(settings.output_dir, topology)
    identity = {
        "model": config.model,
        "train_ds": dataset.train_ds,
        "num_steps": num_steps,
        "epochs": settings.epochs,
        "global_batch_size": topology.world_size * dataset.train_bs * settings.gradient_accumulation_steps,
        "world_size": topology.world_size,
        "seed": settings.seed,
        "max_seq_len": settings.max_seq_len,
        "optimizer": asdict(settings.optimizer),
        "lr_scheduler_type": settings.lr_scheduler_type,
        "warmup_ratio": settings.warmup_ratio,
        "max_grad_norm": settings.max_grad_norm,
        "use_mp": settings.use_mp,
        "lora_peft_config": settings.lora_peft_config and dict(settings.lora_peft_config),
    }
    return CheckpointStore(Path(settings.output_dir) / "checkpoints", identity)


def _sinks(
    config: Config, topology: Topology, num_steps: int, resume_step: int | None, stack: ExitStack
) -> tuple[MetricSink, Callable[[str], None]]:
    """Open the places that metrics and text go to: nowhere, except on rank 0."""
    if not topology.is_main:
        return FanOut([]), lambda text: None
    output = Path(config.train_parameters.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    save_config(config, output / "config.yaml")
    progress = ProgressSink(num_steps, initial_step=resume_step or 0)
    sinks: list[MetricSink] = [JsonlSink(output / "metrics.jsonl", resume_step), progress]
    if config.enable_wandb_logging:
        sinks.append(WandbSink(config.wandb_config, asdict(config)))
    return stack.enter_context(FanOut(sinks)), progress.say


def _exam(
    config: Config,
    topology: Topology,
    engine: Engine | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    resume_step: int | None,
    say: Callable[[str], None],
) -> Exam | None:
    settings = config.train_parameters
    if settings.sampler is None or engine is None:
        return None
    reward: Any = get_reward(settings.sampler.reward) if settings.sampler.reward else None
    turn = DeviceTurn(
        engine,
        model=model,
        optimizer=optimizer,
        sleep=settings.sampler.sleep,
        offload_optimizer=settings.sampler.offload_optimizer,
        topology=topology,
    )
    return Exam(
        engine,
        read_questions(settings.sampler.prompts),
        samples_path=settings.samples_path if topology.is_main else None,
        resume_step=resume_step,
        reward=reward,
        say=say,
        turn=turn,
    )
