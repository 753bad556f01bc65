"""What a run starts with, the same for fine-tuning and reinforcement learning."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import set_seed
from transformers.utils.logging import disable_progress_bar

from vectorlm.data.loader import Collator, StepLoader, load_dataset
from vectorlm.errors import ConfigError
from vectorlm.packages import is_installed
from vectorlm.ranks.engine_ranks import capture, comparable, gather, require_equal, results_or_first_error
from vectorlm.ranks.placement import Placement, set_affinity, share_cores, split_node
from vectorlm.ranks.process_group import process_group
from vectorlm.ranks.topology import Topology
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.report.card import noted_of
from vectorlm.report.plots import plot_correction, plot_runs, plot_timeline
from vectorlm.report.runs import START, RunFolder
from vectorlm.runs.config.load import load_config
from vectorlm.runs.config.schema import Config
from vectorlm.runs.preflight.checked import CheckedConfig, preflight
from vectorlm.runs.preflight.dry_run import LEFTOVER, dry_run
from vectorlm.runs.preflight.local_model import resolve_model
from vectorlm.runs.preflight.memory import memory_report
from vectorlm.runs.preflight.resume import settings_of_rank
from vectorlm.runs.preflight.summary import notes_of
from vectorlm.train.checkpoint.folder import held, naming_the_full_disk
from vectorlm.train.context import ContextGroup
from vectorlm.train.device_turn import DeviceTurn, put_to_sleep
from vectorlm.train.load import load_model, load_scorer, load_tokenizer, quantize_blocks, round_blocks
from vectorlm.train.lora.load import add_lora, continue_lora, load_adapters, merged
from vectorlm.train.optimizer_step import Schedule
from vectorlm.train.optimizers import make_optimizer
from vectorlm.train.shard import load_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vectorlm.sampling.engine import SamplingEngine


@dataclass(frozen=True)
class Run:
    """What every run has on each rank, and what its config asks for; made by `open_run`."""

    checked: CheckedConfig
    topology: Topology
    engine: SamplingEngine | None
    """None without a section `sampler`."""
    tokenizer: PreTrainedTokenizerBase
    stack: ExitStack
    """Closes what the run opens."""
    reward_workers: WorkerPool | None = None
    """What runs reward functions; None where there are none, or where they run in the ranks."""
    context: ContextGroup | None = None
    """The ranks that share this one's passes; None where it shares none."""

    @property
    def config(self) -> Config:
        """All settings."""
        return self.checked.config

    @property
    def output(self) -> Path:
        """The folder that everything is written to."""
        return Path(self.config.train_parameters.output_dir)

    def read_model(self, *, is_empty: bool) -> Any:
        """Read the model that training starts from, without adapters that are trained."""
        settings = self.config.train_parameters
        is_policy = self.config.reward_model is None
        read = load_model if is_policy else partial(load_scorer, tokenizer=self.tokenizer)
        model = read(
            self.config.model,
            flash_attention=settings.model.use_flash_attention,
            dtype=settings.model.dtype,
            is_empty=is_empty,
        )
        if settings.merge_adapters and not is_empty:
            assert settings.adapters is not None, "preflight has seen to it"
            adapters = Path(settings.adapters)
            model = merge_of_run(load_adapters(adapters, model), adapters.parent, adapters).requires_grad_(
                True
            )
        return model

    def load_model(self, *, keeps_start: bool = False) -> nn.Module:
        """Load, adapt and shard the model; afterwards every rank has its own random state.

        `keeps_start` is as for `continue_lora`.
        """
        settings = self.config.train_parameters
        set_seed(settings.seed)

        def load(is_empty: bool) -> nn.Module:
            model = self.read_model(is_empty=is_empty)
            if settings.model.quantization is not None:
                quantize_blocks(model, self.topology.device)
            options = settings.lora_peft_config
            if options is None or settings.adapters is None:
                return model if options is None else add_lora(model, options)
            path = Path(settings.adapters)
            return continue_lora(model, path, options, is_empty=is_empty, keeps_start=keeps_start)

        model = self.load_sharded(load)
        set_seed((settings.seed + self.topology.rank) % 2**32)
        return model

    def load_sharded(self, load: Callable[[bool], nn.Module]) -> nn.Module:
        """Load a model as `vectorlm.train.shard.load_sharded` does, sharded as the config says."""
        return load_sharded(load, self.topology, self.config.train_parameters.model)

    def make_loader(
        self,
        path: str,
        ignore_index: int,
        micro_batch_size: int,
        num_micro_batches: int = 1,
        *,
        shuffle: bool,
    ) -> StepLoader:
        """Read a preprocessed dataset in the optimizer steps of this run; arguments are as for `StepLoader`."""
        settings = self.config.train_parameters
        return StepLoader(
            load_dataset(path, self.tokenizer),
            Collator(self.tokenizer.pad_token_id or 0, ignore_index, settings.max_seq_len),
            self.topology,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            seed=settings.seed,
            shuffle=shuffle,
        )

    def make_optimizer(self, model: nn.Module, lr: float | None = None) -> torch.optim.Optimizer:
        """Return the optimizer of the trainable parameters; `lr` replaces the config's learning rate."""
        return make_optimizer(self.config.train_parameters.optimizer, model, self.topology.is_cuda, lr)

    def make_schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Schedule:
        """Return the learning rate's schedule over `num_steps` optimizer steps."""
        settings = self.config.train_parameters.schedule
        try:
            return Schedule(
                settings.lr_scheduler_type,
                optimizer,
                num_warmup_steps=math.ceil(settings.warmup_ratio * num_steps),
                num_steps=num_steps,
                **settings.lr_scheduler_kwargs,
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"train_parameters.lr_scheduler_kwargs={dict(settings.lr_scheduler_kwargs)} cannot be used with "
                f"{settings.lr_scheduler_type}: {error}. Correct it, or leave it out."
            ) from error

    def make_turn(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> DeviceTurn | None:
        """Return what hands the devices over to the engine; None without an engine."""
        sampler = self.config.train_parameters.sampler
        overlap = self.config.overlap
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


def merge_of_run(model: Any, run: Path, adapters: Path) -> Any:
    """Merge the adapters of `model`, from the folder `adapters`, which the run in `run` has trained, if it has.

    Raises:
        ConfigError: As `vectorlm.train.lora.load.merged`.
    """
    settings = run / "config.yaml"
    quantization = noted_of(adapters, "quantization", str)  # Of adapters that have left their run.
    if settings.is_file():
        quantization = quantization or load_config(settings).train_parameters.model.quantization
    if quantization is not None:
        # The adapters were trained on these numbers.
        round_blocks(model)
    return merged(model)


@contextmanager
def open_run(
    config: Config | CheckedConfig,
    topology: Topology | None = None,
    engine: SamplingEngine | None = None,
) -> Iterator[Run]:
    """Start what every run has, close it at the end, and draw the plots of a run that succeeded.

    A `config` that was not checked is checked here, by rank 0 for all. A given `engine` stays open.
    """
    given = config if isinstance(config, CheckedConfig) else None
    plain = config.config if isinstance(config, CheckedConfig) else resolve_model(config)
    output = plain.train_parameters.output_dir
    context_parallel = plain.train_parameters.model.context_parallel
    topology = replace(topology or Topology.from_environment(), context_parallel=context_parallel)
    # ProgressSink shows the only progress bar of a run.
    disable_progress_bar()
    with ExitStack() as stack:
        placement = place_ranks(plain, topology, stack)
        stack.enter_context(process_group(topology))
        settings = capture(lambda: comparable(settings_of_rank(plain)))
        require_equal(results_or_first_error(gather(topology, settings)))
        found: list[Any] = [None]
        if topology.is_main:
            result, error = capture(lambda: _look(plain, given, topology, stack))
            # What was given is on the other ranks already.
            found = [(result if given is None else None, error)]
        dist.broadcast_object_list(found)
        (sent,) = results_or_first_error(found)
        checked: CheckedConfig = sent if given is None else given
        # Before the model: the engine loads in its own process while the ranks load theirs.
        engine = engine or open_engine(checked.config, topology, stack, placement)
        workers = open_reward_workers(checked.config, topology, stack, engine)
        with naming_the_full_disk(output):
            context = ContextGroup.of(topology)
            tokenizer = load_tokenizer(plain.model, plain.step_separator)
            yield Run(checked, topology, engine, tokenizer, stack, workers, context)
    if topology.is_main and is_installed("matplotlib"):
        print(f"drawing the pictures in {output}", file=sys.stderr, flush=True)
        _plot(plain)


def _look(
    config: Config, checked: CheckedConfig | None, topology: Topology, stack: ExitStack
) -> CheckedConfig:
    """Check a config that was not checked before, plan its memory, and hold its output folder until `stack` closes."""
    checked = checked or preflight(config, topology.world_size, topology.num_nodes)
    # Here, not in `preflight`: the command that starts the ranks touches no device.
    total = torch.cuda.get_device_properties(topology.device).total_memory if topology.is_cuda else None
    near = topology.local_world_size
    report = memory_report(checked.config, topology.world_size, device_bytes=total, ranks_per_node=near)
    output = Path(config.train_parameters.output_dir)
    stack.enter_context(held(output))
    for leftover in output.glob(f"{LEFTOVER}*"):  # Of a run that was killed at its start.
        shutil.rmtree(leftover, ignore_errors=True)
    notes = [f"  note: {note}" for note in (*notes_of(checked.config), *dry_run(checked.config))]
    print(*notes, report, sep="\n", file=sys.stderr, flush=True)
    # Of an earlier run: `vectorlm watch` shows this one as starting until its models are loaded.
    (output / START).unlink(missing_ok=True)
    return checked


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
    config: Config, topology: Topology, stack: ExitStack, placement: Placement | None = None
) -> SamplingEngine | None:
    """Start the engine that the config asks for."""
    sampler = config.train_parameters.sampler
    if sampler is None:
        return None
    from vectorlm.sampling.engine import SamplingEngine

    settings = sampler.engine
    output = Path(config.train_parameters.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    engine = stack.enter_context(
        SamplingEngine(
            config.model,
            replace(settings, engine_args={}),
            topology=topology,
            devices=None if placement is None else placement.engine,
            log_path=output / "sampler.log",
            **config.engine_arguments(topology.is_cuda),
        )
    )
    if topology.is_cuda:
        put_to_sleep(engine, sampler.turn.sleep)
    return engine


def open_reward_workers(
    config: Config, topology: Topology, stack: ExitStack, engine: SamplingEngine | None
) -> WorkerPool | None:
    """Start what runs the reward functions of a config."""
    rl = config.rl
    has_rewards = (rl is not None and rl.all_rewards) or config.held_out_rewards
    size = "auto" if rl is None else rl.reward.reward_workers
    if not has_rewards or size == 0:
        return None
    output = Path(config.train_parameters.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    num_workers = WorkerPool.auto_size(topology.local_world_size) if size == "auto" else size
    if rl is not None and engine is not None and engine.local is not None:
        # Rollouts are scored beside their engine, for all ranks that it serves.
        num_workers *= engine.engine_ranks.ranks_per_engine
    return stack.enter_context(WorkerPool(num_workers, output / "rewards.log"))


def _plot(config: Config) -> None:
    output = Path(config.train_parameters.output_dir)
    run = RunFolder(output)
    plot_runs([run], output / "run.png")
    if config.rl is not None:
        plot_timeline(output / "timeline.jsonl", output / "timeline.png")
        mismatch = config.rl.correction.mismatch
        band = mismatch.band_low, mismatch.band_high
        plot_correction(run, output / "correction.jsonl", output / "correction.png", band)
