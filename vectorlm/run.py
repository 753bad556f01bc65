"""What surrounds the loop of a run, the same for fine-tuning and reinforcement learning."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from transformers import set_seed
from transformers.utils.logging import disable_progress_bar

from vectorlm.checkpoint.export import export_model
from vectorlm.checkpoint.folder import held, mark_finished, naming_the_full_disk, require_shared
from vectorlm.checkpoint.state import CheckpointStore
from vectorlm.config import Config, save_config, to_plain
from vectorlm.config.resume import Resumption, find_resumption, identity_of
from vectorlm.data.prompts import read_prompts
from vectorlm.dist.engine_ranks import capture, results_or_first_error
from vectorlm.dist.launcher import process_group
from vectorlm.dist.placement import Placement, set_affinity, share_cores, split_node
from vectorlm.dist.topology import Topology
from vectorlm.errors import ConfigError
from vectorlm.lora.load import add_lora
from vectorlm.lora.options import engine_arguments, refused_options
from vectorlm.memory.from_config import memory_report
from vectorlm.rewards.evaluation import Evaluator
from vectorlm.rewards.registry import get_reward
from vectorlm.telemetry.metrics import CoreWatch, FanOut, JsonlSink, ProgressSink, Sink, WandbSink
from vectorlm.telemetry.plots import plot_correction, plot_run
from vectorlm.telemetry.timeline import plot_timeline
from vectorlm.train.device_turn import DeviceTurn, put_to_sleep
from vectorlm.train.load import load_model, load_tokenizer
from vectorlm.train.optimizer_step import Schedule
from vectorlm.train.recorder import Recorder
from vectorlm.train.shard import load_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vectorlm.engine.engine import SamplingEngine


@dataclass(frozen=True)
class Run:
    """What every run has on each rank, and what its config asks for; made by `open_run`."""

    config: Config
    topology: Topology
    engine: SamplingEngine | None
    """None without a section `sampler`."""
    tokenizer: PreTrainedTokenizerBase
    stack: ExitStack
    """Closes what the run opens."""

    @property
    def output(self) -> Path:
        """The folder that everything is written to."""
        return Path(self.config.train_parameters.output_dir)

    def path_on_main(self, name: str) -> Path | None:
        """Return the path of an output file on rank 0; None on the other ranks."""
        return self.output / name if self.topology.is_main else None

    def load_model(self) -> nn.Module:
        """Load, adapt and shard the model; afterwards every rank has its own random state."""
        settings = self.config.train_parameters
        set_seed(settings.seed)
        how = settings.model

        def load(is_empty: bool) -> nn.Module:
            flash_attention = how.use_flash_attention
            model = load_model(
                self.config.model, flash_attention=flash_attention, dtype=how.dtype, is_empty=is_empty
            )
            return model if settings.lora_peft_config is None else add_lora(model, settings.lora_peft_config)

        model = self.load_sharded(load)
        set_seed((settings.seed + self.topology.rank) % 2**32)
        return model

    def load_sharded(self, load: Callable[[bool], nn.Module]) -> nn.Module:
        """Load a model as `vectorlm.train.shard.load_sharded` does, sharded as the config says."""
        return load_sharded(load, self.topology, self.config.train_parameters.model)

    def make_optimizer(self, model: nn.Module, lr: float | None = None) -> torch.optim.AdamW:
        """Return AdamW over the trainable parameters of `model`; `lr` replaces the config's learning rate."""
        arguments = asdict(self.config.train_parameters.optimizer)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # On CUDA torch would else make a temporary copy of all its state at once.
        arguments |= {"fused": self.topology.is_cuda or None} | ({} if lr is None else {"lr": lr})
        return torch.optim.AdamW(trainable, **arguments)

    def make_schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Schedule:
        """Return the learning rate's schedule over `num_steps` optimizer steps."""
        settings = self.config.train_parameters.schedule
        num_warmup_steps = math.ceil(settings.warmup_ratio * num_steps)
        return Schedule(
            settings.lr_scheduler_type, optimizer, num_warmup_steps=num_warmup_steps, num_steps=num_steps
        )

    def make_turn(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> DeviceTurn | None:
        """Return what hands the devices over to the engine; None without an engine."""
        sampler, overlap = self.config.train_parameters.sampler, self.config.overlap
        if sampler is None or self.engine is None:
            return None
        return DeviceTurn(
            self.engine,
            model=model,
            optimizer=optimizer,
            sleep=sampler.turn.sleep,
            offload_optimizer=sampler.turn.offload_optimizer,
            in_flight="refuse" if overlap is None else overlap.update,
            topology=self.topology,
        )

    def make_recorder(
        self, turn: DeviceTurn | None, *, num_steps: int, save_every: int, num_examples: int | None = None
    ) -> Recorder:
        """Open metrics, checkpoints and evaluation; `num_examples` are the rows of a training dataset."""
        settings = self.config.train_parameters
        store = None
        if settings.checkpointing_enabled:
            require_shared(settings.output_dir, self.topology)
            identity = identity_of(self.config, self.topology.world_size, num_examples)
            store = CheckpointStore(self.output / "checkpoints", identity)
        resumption = self._find_resumption(num_examples)
        resume_step = None if resumption is None else resumption.step
        sink, say = self._open_sinks(num_steps, resumption)
        sampler, evaluation = settings.sampler, None
        if turn is not None and sampler is not None:
            evaluation = Evaluator(
                turn,
                read_prompts(sampler.evaluation.prompts),
                samples_path=settings.samples_path if self.topology.is_main else None,
                resume_step=resume_step,
                reward=get_reward(sampler.evaluation.reward) if sampler.evaluation.reward else None,
                timeout_s=sampler.engine.timeout_s,
                say=say,
            )
        return Recorder(
            num_steps=num_steps,
            sink=sink,
            say=say,
            evaluation=evaluation,
            evaluate_every=sampler.evaluation.sample_frequency if sampler else 1,
            checkpoints=store,
            save_every=save_every,
            resume_step=resume_step,
        )

    def export(self, model: nn.Module) -> None:
        """Write the final model; called on all ranks."""
        export_model(model, self.tokenizer, self.output / "final-model")
        if self.topology.is_main and self.config.train_parameters.checkpointing_enabled:
            mark_finished(self.output / "checkpoints")

    def _find_resumption(self, num_examples: int | None) -> Resumption | None:
        """Look for checkpoints on rank 0: a shared file system may show the other ranks an older state."""
        found: list[Any] = [None]
        if self.topology.is_main:
            world_size = self.topology.world_size
            found = [capture(lambda: find_resumption(self.config, world_size, num_examples))]
        dist.broadcast_object_list(found)
        (resumption,) = results_or_first_error(found)
        return resumption

    def _open_sinks(
        self, num_steps: int, resumption: Resumption | None
    ) -> tuple[FanOut, Callable[[str], None]]:
        """Open what takes metrics, and what shows text, on rank 0; the other ranks write nothing."""
        if not self.topology.is_main:
            return FanOut([]), lambda text: None
        self.output.mkdir(parents=True, exist_ok=True)
        save_config(self.config, self.output / "config.yaml")
        resume_step = None if resumption is None else resumption.step
        note = {"num_steps": num_steps, "first_step": resume_step or 0, "started_at": time.time()}
        (self.output / "run.json").write_text(json.dumps(note))
        # Under the launcher its other ranks are this process's siblings.
        root = psutil.Process(os.getppid() if self.topology.error_file else os.getpid())
        progress = ProgressSink(num_steps, initial_step=resume_step or 0, notice=CoreWatch(root).notice)
        sinks: list[Sink] = [JsonlSink(self.output / "metrics.jsonl", resume_step), progress]
        if self.config.enable_wandb_logging:
            sinks.append(WandbSink(self.config.wandb_config, to_plain(self.config)))
        if resumption is not None:
            folder = self.config.train_parameters.output_dir
            progress.say(f"resuming {folder} from step {resume_step}; delete its checkpoints to start over")
            for change in resumption.changes:
                progress.say(f"  from here on {change}")
        return self.stack.enter_context(FanOut(sinks)), progress.say


@contextmanager
def open_run(
    config: Config, topology: Topology | None = None, engine: SamplingEngine | None = None, **engine_args: Any
) -> Iterator[Run]:
    """Start what every run has, close it at the end, and draw the plots of a run that succeeded.

    The config's engine arguments win over `engine_args`. A given `engine` stays open.
    """
    topology = topology or Topology.from_environment()
    total = torch.cuda.get_device_properties(topology.device).total_memory if topology.is_cuda else None
    near = topology.local_world_size
    report = memory_report(config, topology.world_size, device_bytes=total, ranks_per_node=near)
    if topology.is_main:
        print(report, file=sys.stderr, flush=True)
    # ProgressSink shows the only progress bar of a run.
    disable_progress_bar()
    with ExitStack() as stack:
        if topology.is_main:
            stack.enter_context(held(Path(config.train_parameters.output_dir)))
            # Of an earlier run: `vectorlm watch` shows this one as starting until its models are loaded.
            Path(config.train_parameters.output_dir, "run.json").unlink(missing_ok=True)
        placement = place_ranks(config, topology, stack)
        stack.enter_context(process_group(topology))
        # Before the model: the engine loads in its own process while the ranks load theirs.
        engine = engine or open_engine(config, topology, stack, placement, **engine_args)
        with naming_the_full_disk(config.train_parameters.output_dir):
            yield Run(config, topology, engine, load_tokenizer(config.model), stack)
    if topology.is_main:
        _plot(config)


def place_ranks(config: Config, topology: Topology, stack: ExitStack) -> Placement | None:
    """Keep the ranks off the cores or devices that the config gives to the engine alone; None where they share.

    Closing `stack` gives this process all cores back.
    """
    overlap = config.overlap
    if overlap is None or overlap.placement == "shared":
        return None
    placement = split_node(topology, overlap.engine_devices)
    if not topology.is_cuda:
        stack.callback(share_cores, topology)
        stack.callback(set_affinity, tuple(os.sched_getaffinity(0)))
        set_affinity(placement.trainer)
        share_cores(topology)
    return placement


def open_engine(
    config: Config, topology: Topology, stack: ExitStack, placement: Placement | None = None, **more: Any
) -> SamplingEngine | None:
    """Start the engine that the config asks for."""
    sampler = config.train_parameters.sampler
    if sampler is None:
        return None
    from vectorlm.engine.engine import SamplingEngine

    settings, output = sampler.engine, Path(config.train_parameters.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    for_vllm = {
        "dtype": settings.vllm_dtype,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_sleep_mode": sampler.turn.sleep != "none",
        **_lora_arguments(config.train_parameters.lora_peft_config, settings.lora_mode),
    }
    engine_args = {**(for_vllm if settings.inference == "vllm" else {}), **more, **settings.engine_args}
    engine = stack.enter_context(
        SamplingEngine(
            config.model,
            topology=topology,
            sampling_params=dict(settings.sampling_params),
            inference=settings.inference,
            receiver=settings.receiver,
            transport=settings.transport,
            lora_mode="auto" if config.train_parameters.lora_peft_config is None else settings.lora_mode,
            verify_updates=settings.verify_updates,
            devices=None if placement is None else placement.engine,
            timeout_s=settings.timeout_s,
            log_path=output / "sampler.log",
            **engine_args,
        )
    )
    if topology.is_cuda:
        put_to_sleep(engine, sampler.turn.sleep)
    return engine


def _lora_arguments(options: Mapping[str, Any] | None, lora_mode: str) -> dict[str, Any]:
    """Return what the engine needs to apply the run's adapters itself, in mode ``adapter``."""
    if options is None:
        return {}
    for option, value, rule, fix in refused_options(options, lora_mode):
        raise ConfigError(f"train_parameters.lora_peft_config.{option}={value!r} {rule}. {fix}")
    return engine_arguments(options) if lora_mode == "adapter" else {}


def _plot(config: Config) -> None:
    output = Path(config.train_parameters.output_dir)
    metrics = output / "metrics.jsonl"
    plot_run(metrics, output / "run.png")
    if config.rl is not None:
        plot_timeline(output / "timeline.jsonl", output / "timeline.png")
        mismatch = config.rl.correction.mismatch
        band = mismatch.band_low, mismatch.band_high
        plot_correction(metrics, output / "correction.jsonl", output / "correction.png", band)
