"""The parts that every run is built of, made as its config says."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import set_seed

from vectorlm.checkpoint.shared import require_shared
from vectorlm.checkpoint.state import CheckpointStore
from vectorlm.config import Config, save_config
from vectorlm.config.lora import engine_arguments, refused_options
from vectorlm.data.questions import read_questions
from vectorlm.errors import ConfigError
from vectorlm.exam import Exam
from vectorlm.handover import DeviceTurn, lay_down
from vectorlm.memory.from_config import memory_report
from vectorlm.model.load import load_empty_model, load_model
from vectorlm.model.lora import add_lora
from vectorlm.model.schedule import Schedule
from vectorlm.model.shard import fill_from_main, shard_model
from vectorlm.ranks.placement import Placement, settle, share_cores, split_node
from vectorlm.ranks.topology import Topology
from vectorlm.rewards.registry import get_reward
from vectorlm.telemetry.metrics import FanOut, JsonlSink, MetricSink, ProgressSink, WandbSink

if TYPE_CHECKING:
    from vectorlm.sampling.engine import SamplingEngine
    from vectorlm.types import Engine


def say_memory(config: Config, topology: Topology) -> None:
    """Print the memory plan, on rank 0.

    Raises:
        ConfigError: The run needs more memory than there is.
    """
    total = torch.cuda.get_device_properties(topology.device).total_memory if topology.is_cuda else None
    near = topology.local_world_size
    report = memory_report(config, topology.world_size, device_bytes=total, ranks_per_node=near)
    if topology.is_main:
        print(report, file=sys.stderr, flush=True)


def place_ranks(config: Config, topology: Topology, stack: ExitStack) -> Placement | None:
    """Return what of the node is the engine's alone, where the config says so; the ranks then keep off it.

    Args:
        config: The run.
        topology: This rank's place.
        stack: Gives this process all cores back.

    Raises:
        ConfigError: The node has not so many devices.
    """
    overlap = config.overlap
    if overlap is None or overlap.placement == "shared":
        return None
    placement = split_node(topology, overlap.engine_devices)
    if not topology.is_cuda:
        stack.callback(share_cores, topology)
        stack.callback(settle, tuple(os.sched_getaffinity(0)))
        settle(placement.trainer)
        share_cores(topology)
    return placement


def open_engine(
    config: Config, topology: Topology, stack: ExitStack, placement: Placement | None = None, **more: Any
) -> SamplingEngine | None:
    """Start the engine that the config asks for, closed with `stack`; on CUDA it is loaded when this returns.

    Args:
        config: The run.
        topology: This rank's place.
        stack: Closes the engine.
        placement: Where the engine computes, if not on the ranks' own devices.
        **more: Arguments of the engine that the config's own win over.
    """
    sampler = config.train_parameters.sampler
    if sampler is None:
        return None
    from vectorlm.sampling.engine import SamplingEngine

    output = Path(config.train_parameters.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    of_vllm = {
        "dtype": sampler.vllm_dtype,
        "gpu_memory_utilization": sampler.gpu_memory_utilization,
        "enable_sleep_mode": sampler.sleep != "none",
        **_lora_arguments(config),
    }
    engine_args = {**(of_vllm if sampler.inference == "vllm" else {}), **more, **sampler.engine}
    engine = stack.enter_context(
        SamplingEngine(
            config.model,
            topology=topology,
            sampling_params=dict(sampler.sampling_params),
            inference=sampler.inference,
            receiver=sampler.receiver,
            lora_mode="auto" if config.train_parameters.lora_peft_config is None else sampler.lora_mode,
            verify_updates=sampler.verify_updates,
            devices=None if placement is None else placement.engine,
            timeout_s=sampler.timeout_s,
            log_path=output / "sampler.log",
            **engine_args,
        )
    )
    if topology.is_cuda:
        # vLLM sizes its cache by the memory that is free, so the trainer takes its own afterwards.
        engine.wait_until_ready()
        lay_down(engine, sampler.sleep)
    return engine


def make_model(config: Config, topology: Topology) -> nn.Module:
    """Load, adapt and shard the model; afterwards every rank draws its own random numbers."""
    settings = config.train_parameters
    set_seed(settings.seed)
    is_empty = settings.low_cpu_mem_usage and not topology.is_main
    load = load_empty_model if is_empty else load_model
    model: Any = load(config.model, flash_attention=settings.use_flash_attention)
    if settings.lora_peft_config is not None:
        model = add_lora(model, settings.lora_peft_config)
    weights = model.state_dict() if settings.low_cpu_mem_usage and topology.is_main else {}
    shard_as_configured(model, config, topology)
    if settings.low_cpu_mem_usage:
        fill_from_main(model, weights, topology.device)
    set_seed((settings.seed + topology.rank) % 2**32)
    return model


def shard_as_configured(model: Any, config: Config, topology: Topology) -> nn.Module:
    """Shard any model of the run as its config says."""
    settings = config.train_parameters
    return shard_model(
        model,
        topology,
        strategy=settings.sharding_strategy,
        mixed_precision=settings.use_mp,
        activation_checkpointing=settings.use_activation_checkpointing,
    )


def make_optimizer(
    config: Config, parameters: Iterable[nn.Parameter], lr: float | None = None
) -> torch.optim.AdamW:
    """Return the config's AdamW over the parameters that are trained; with `lr`, at that learning rate."""
    arguments = asdict(config.train_parameters.optimizer)
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trainable, **(arguments | ({} if lr is None else {"lr": lr})))


def make_schedule(config: Config, optimizer: torch.optim.Optimizer, num_steps: int) -> Schedule:
    """Return the config's learning rate over so many optimizer steps."""
    settings = config.train_parameters
    return Schedule(
        settings.lr_scheduler_type,
        optimizer,
        num_warmup_steps=math.ceil(settings.warmup_ratio * num_steps),
        num_steps=num_steps,
    )


def make_store(config: Config, topology: Topology, **identity: Any) -> CheckpointStore:
    """Return the checkpoints of the run.

    Args:
        config: The run.
        topology: This rank's place.
        **identity: JSON values that must be equal to go on from a checkpoint, besides those of every run.

    Raises:
        CheckpointError: A node does not see the folder.
    """
    settings = config.train_parameters
    require_shared(settings.output_dir, topology)
    of_every_run = {
        "model": config.model,
        "world_size": topology.world_size,
        "seed": settings.seed,
        "optimizer": asdict(settings.optimizer),
        "lr_scheduler_type": settings.lr_scheduler_type,
        "warmup_ratio": settings.warmup_ratio,
        "max_grad_norm": settings.max_grad_norm,
        "use_mp": settings.use_mp,
        "lora_peft_config": settings.lora_peft_config and dict(settings.lora_peft_config),
    }
    return CheckpointStore(Path(settings.output_dir) / "checkpoints", {**of_every_run, **identity})


def make_turn(
    config: Config, topology: Topology, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer
) -> DeviceTurn:
    """Return the owner of the devices."""
    sampler = config.train_parameters.sampler
    assert sampler is not None
    overlap = config.overlap
    return DeviceTurn(
        engine,
        model=model,
        optimizer=optimizer,
        sleep=sampler.sleep,
        offload_optimizer=sampler.offload_optimizer,
        in_flight="refuse" if overlap is None else overlap.update,
        topology=topology,
    )


def make_exam(
    config: Config,
    topology: Topology,
    turn: DeviceTurn,
    engine: Engine,
    resume_step: int | None,
    say: Callable[[str], None],
) -> Exam:
    """Return the exam on the sampler's own prompts."""
    settings = config.train_parameters
    assert settings.sampler is not None
    return Exam(
        engine,
        read_questions(settings.sampler.prompts),
        samples_path=settings.samples_path if topology.is_main else None,
        resume_step=resume_step,
        reward=get_reward(settings.sampler.reward) if settings.sampler.reward else None,
        say=say,
        turn=turn,
    )


def open_sinks(
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
    say = progress.say
    if resume_step is not None:
        folder = config.train_parameters.output_dir
        say(f"resuming {folder} from step {resume_step}; delete its checkpoints to start anew")
    return stack.enter_context(FanOut(sinks)), say


def _lora_arguments(config: Config) -> dict[str, Any]:
    """Return what the engine needs to compute with the run's adapters itself; nothing where it does not."""
    sampler, options = config.train_parameters.sampler, config.train_parameters.lora_peft_config
    if sampler is None or options is None:
        return {}
    for option, value, rule, fix in refused_options(options, sampler.lora_mode):
        raise ConfigError(f"train_parameters.lora_peft_config.{option}={value!r} {rule}. {fix}")
    return engine_arguments(options) if sampler.lora_mode == "adapter" else {}
