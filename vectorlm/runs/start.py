"""Set-up shared by fine-tuning and RL: process group, checked config, engine, tokenizer, reward workers."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils.logging import disable_progress_bar

from vectorlm.data.images import ImageTokens, image_tokens_of
from vectorlm.data.loader import Collator, StepLoader, load_dataset
from vectorlm.errors import ConfigError, HandleRefused, WeightMismatch
from vectorlm.packages import is_installed
from vectorlm.ranks.engine_ranks import capture, comparable, gather, require_equal, results_or_first_error
from vectorlm.ranks.launcher import process_group
from vectorlm.ranks.topology import (
    Placement,
    Topology,
    return_freed_memory,
    set_affinity,
    share_cores,
    split_node,
)
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.report.card import noted_of
from vectorlm.report.plots import plot_correction, plot_runs, plot_timeline
from vectorlm.report.runs import START, RunFolder
from vectorlm.runs.config.load import load_config
from vectorlm.runs.config.schema import Config
from vectorlm.runs.preflight.checked import CheckedConfig, preflight
from vectorlm.runs.preflight.dry_run import LEFTOVER, dry_run
from vectorlm.runs.preflight.local_model import description_of, resolve_model
from vectorlm.runs.preflight.memory import amount, memory_report
from vectorlm.runs.preflight.resume import settings_of_rank
from vectorlm.runs.preflight.shared_base import shares_base
from vectorlm.runs.preflight.summary import notes_of
from vectorlm.sampling.engine import SamplingEngine
from vectorlm.sampling.settings import RETURN_ROUTES, has_experts
from vectorlm.train.checkpoint.folder import locked, naming_the_full_disk
from vectorlm.train.exact import exact
from vectorlm.train.handover import DeviceTurn, put_to_sleep
from vectorlm.train.images import weights_of_parts
from vectorlm.train.load import (
    load_model,
    load_scorer,
    load_tokenizer,
    quantize_blocks,
    reads_images,
    round_blocks,
    trust_code,
)
from vectorlm.train.lora import add_lora, continue_lora, load_adapters, merged
from vectorlm.train.optimizer_step import Schedule
from vectorlm.train.optimizers import make_optimizer
from vectorlm.train.packing import ContextGroup
from vectorlm.train.settings import ModelSettings
from vectorlm.train.shard import load_sharded


@dataclass(frozen=True)
class Run:
    """The parts of a run on one rank, from `open_run`, and methods that make further parts from the config."""

    checked: CheckedConfig
    topology: Topology
    engine: SamplingEngine | None
    """The engine; None for fine-tuning without evaluation by answers."""
    tokenizer: PreTrainedTokenizerBase
    stack: ExitStack
    """The stack that closes the resources of the run."""
    reward_workers: WorkerPool | None = None
    """Worker processes for reward functions; None if there are no rewards or the ranks compute them."""
    context: ContextGroup | None = None
    """The ranks among which each sequence is split; None without context parallelism."""

    @property
    def config(self) -> Config:
        """The config with all settings."""
        return self.checked.config

    @property
    def output(self) -> Path:
        """The run's output folder."""
        return Path(self.config.train_parameters.output_dir)

    @cached_property
    def image_tokens(self) -> ImageTokens | None:
        """The tokens of pictures; None if the model is not a vision-language model."""
        return image_tokens_of(self.tokenizer) if reads_images(self.config.model) else None

    def read_model(self, *, is_empty: bool) -> Any:
        """Read the model that training starts from, without the adapters that are trained."""
        settings = self.config.train_parameters
        read = partial(load_model, fp32_head=settings.model.fp32_head)
        if self.config.reward_model is not None:
            read = partial(load_scorer, tokenizer=self.tokenizer)
        read = partial(
            read, self.config.model, flash_attention=settings.model.use_flash_attention, is_empty=is_empty
        )
        if is_empty:
            return read(dtype=settings.model.dtype)
        return read_start(read, self.config)

    def load_model(self, *, keeps_start: bool = False) -> nn.Module:
        """Load and shard the model with its adapters, then give every rank its own random state.

        `keeps_start`: see `continue_lora`.
        """
        settings = self.config.train_parameters
        set_seed(settings.seed)

        def load(is_empty: bool) -> nn.Module:
            model = self.read_model(is_empty=is_empty)
            if settings.model.quantization is not None:
                quantize_blocks(model, self.topology.device)
            model = with_trained_parts(model, self.config, is_empty=is_empty, keeps_start=keeps_start)
            return exact(model) if settings.model.exact else model

        model = load_sharded(load, self.topology, settings.model, self._share_base)
        # Ranks that split a model must drop out the same numbers.
        set_seed((settings.seed + self.topology.rank // self.topology.model_parallel) % 2**32)
        return model

    def _share_base(self, model: nn.Module) -> Collection[nn.Parameter]:
        """Make the frozen base of `model` share the engine's memory, if the config allows it; return its parameters."""
        parameters: Collection[nn.Parameter] = ()
        if self.engine is None or not shares_base(self.config, self.topology.is_cuda):
            return parameters
        try:
            shared = self.engine.share_base(model)
        except (WeightMismatch, HandleRefused, ConfigError) as error:
            if self.config.train_parameters.share_base:
                raise ConfigError(
                    f"train_parameters.share_base=true cannot be used here: {error} Leave it out to have two copies."
                ) from error
            text = f"the base is in memory twice: {error}"
        else:
            parameters = shared.parameters
            return_freed_memory()  # The memory of the weights that were read.
            text = f"{amount(shared.num_bytes)} of the base are in memory once"
            if shared.num_private_bytes:
                text += f", and {amount(shared.num_private_bytes)}, in another layout, twice"
        if self.topology.is_main:
            print(f"share_base: {text}", file=sys.stderr, flush=True)
        return parameters

    def load_sharded(self, load: Callable[[bool], nn.Module]) -> nn.Module:
        """Load another model than the trained one, and shard it over all ranks; see `vectorlm.train.shard`."""
        return load_sharded(load, self.topology, self.config.train_parameters.model.unsplit)

    def make_loader(
        self,
        path: str,
        ignore_index: int,
        micro_batch_size: int,
        num_micro_batches: int = 1,
        *,
        shuffle: bool,
    ) -> StepLoader:
        """Return a loader of a preprocessed dataset; for the arguments see `StepLoader`."""
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
        """Return the optimizer of the trainable parameters; `lr` overrides the config's learning rate."""
        return make_optimizer(self.config.train_parameters.optimizer, model, self.topology.is_cuda, lr)

    def make_schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Schedule:
        """Return the learning rate schedule for `num_steps` optimizer steps."""
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
        """Return the object that hands the devices over between trainer and engine; None without an engine."""
        overlap = self.config.overlap
        if self.engine is None:
            return None
        turn = DeviceTurn(
            self.engine,
            model=model,
            optimizer=optimizer,
            sleep=self.config.engine.turn.sleep,
            offload_optimizer=self.config.engine.turn.offload_optimizer,
            in_flight="refuse" if overlap is None else overlap.update,
            topology=self.topology,
        )
        turn.check_sleep()
        return turn


def on_main(topology: Topology, work: Callable[[], Any]) -> Any:
    """Call `work` on rank 0 and return its result, or raise its error, on all ranks."""
    found: list[Any] = [capture(work) if topology.is_main else None]
    dist.broadcast_object_list(found)
    (result,) = results_or_first_error(found)
    return result


def read_start(read: Callable[..., Any], config: Config) -> Any:
    """Read the model with ``read(dtype=…)``, and merge the adapters that `merge_adapters` names into it.

    The base has the dtype and the rounding of the adapters' training; the merged model has the dtype of `config`.
    """
    train = config.train_parameters
    model = read(dtype=train.model.dtype)
    if train.merge_adapters and train.adapters is not None:
        adapters = Path(train.adapters)
        settings = base_settings_of(adapters.parent, adapters)
        base = model if settings.dtype == train.model.dtype else read(dtype=settings.dtype)
        round_base(base, settings)
        if base is not model:
            with torch.no_grad():
                for mine, rounded in zip(model.parameters(), base.parameters(), strict=True):
                    mine.copy_(rounded)
        model = merged(load_adapters(adapters, model))
        model.requires_grad_(True)
    return model


def with_trained_parts(
    model: Any, config: Config, *, is_empty: bool = False, keeps_start: bool = False
) -> Any:
    """Add the adapters of a run to the model, and freeze the parts in `train_parameters.freeze`.

    `is_empty` and `keeps_start`: see `continue_lora`.
    """
    train = config.train_parameters
    options = train.lora_peft_config
    # Listed before the adapters are added: these are trained in every part.
    frozen = weights_of_parts(model, train.model.freeze) if reads_images(config.model) else []
    if options is not None and train.adapters is None:
        model = add_lora(model, options)
    elif options is not None and train.adapters is not None:
        path = Path(train.adapters)
        model = continue_lora(model, path, options, is_empty=is_empty, keeps_start=keeps_start)
    for weight in frozen:
        weight.requires_grad_(False)
    return model


def base_settings_of(run: Path, adapters: Path) -> ModelSettings:
    """Return the settings with which the base of the folder `adapters`, perhaps of the run in `run`, was loaded.

    The model card has them. For a card without them, the run's config has them.
    """
    known: Any = {"dtype": ("float32", "bfloat16"), "quantization": ("nf4",)}
    noted = {name: noted_of(adapters, name, str) for name in known}
    # A card of other programs may use these names for something else.
    noted = {name: value for name, value in noted.items() if value in known[name]}
    # Next to adapters that were copied out of their run, config.yaml may belong to anything.
    if noted or not (run / START).is_file() or not (run / "config.yaml").is_file():
        return replace(ModelSettings(), **noted)
    return load_config(run / "config.yaml").train_parameters.model


def round_base(model: Any, settings: ModelSettings) -> None:
    """Round the base of adapters as in their training, whose `settings` `base_settings_of` returns.

    Raises:
        ConfigError: Rounding needs a package that is not installed.
    """
    if settings.quantization is None:
        return
    try:
        round_blocks(model)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the adapters were trained on {model.name_or_path} in {settings.quantization}, and rounding it again "
            f"needs the package {error.name}, which is not installed. Run: pip install 'vectorlm[qlora]'"
        ) from error


@contextmanager
def open_run(
    config: Config | CheckedConfig, topology: Topology | None = None, engine: SamplingEngine | None = None
) -> Iterator[Run]:
    """Open the parts of a run, close them at the end, and draw plots if the run succeeded.

    Rank 0 checks a `config` that was not checked before. A given `engine` stays open.
    """
    given = config if isinstance(config, CheckedConfig) else None
    plain = config.config if isinstance(config, CheckedConfig) else resolve_model(config)
    output = Path(plain.train_parameters.output_dir)
    parallel = plain.train_parameters.model
    topology = replace(
        topology or Topology.from_environment(),
        context_parallel=parallel.context_parallel,
        model_parallel=parallel.model_parallel,
    )
    # ProgressSink shows the only progress bar of a run.
    disable_progress_bar()

    def check() -> CheckedConfig | None:
        checked = given or preflight(plain, topology.world_size, topology.num_nodes)
        # Not in `preflight`: the command that starts the ranks does not touch the devices.
        total = torch.cuda.get_device_properties(topology.device).total_memory if topology.is_cuda else None
        near = topology.local_world_size
        report = memory_report(checked.config, topology.world_size, device_bytes=total, ranks_per_node=near)
        stack.enter_context(locked(output))
        for leftover in output.glob(f"{LEFTOVER}*"):  # of a run that was killed at its start
            shutil.rmtree(leftover, ignore_errors=True)
        notes = [f"  note: {note}" for note in (*notes_of(checked.config), *dry_run(checked.config))]
        print(*notes, report, sep="\n", file=sys.stderr, flush=True)
        # The file of an earlier run: `vectorlm watch` shows this run as starting until its models are loaded.
        (output / START).unlink(missing_ok=True)
        return checked if given is None else None  # The other ranks have the given config already.

    with ExitStack() as stack:
        placement = place_ranks(plain, topology, stack)
        stack.enter_context(process_group(topology))
        settings = capture(lambda: comparable(settings_of_rank(plain)))
        require_equal(results_or_first_error(gather(topology, settings)))
        for folder in plain.model_folders.values() if plain.trust_remote_code else ():
            trust_code(folder)
        found = on_main(topology, check)
        checked: CheckedConfig = found if given is None else given
        # Before the model: the engine loads in its own process while the ranks load theirs.
        engine = engine or open_engine(checked.config, topology, stack, placement)
        workers = open_reward_workers(checked.config, topology, stack, engine)
        with naming_the_full_disk(plain.train_parameters.output_dir):
            context = ContextGroup.of(topology)
            tokenizer = load_tokenizer(plain.model, plain.chat, plain.step_separator)
            yield Run(checked, topology, engine, tokenizer, stack, workers, context)
    if topology.is_main and is_installed("matplotlib"):
        print(f"drawing the plots in {output}", file=sys.stderr, flush=True)
        run = RunFolder(output)
        plot_runs([run], output / "run.png")
        if plain.rl is not None:
            plot_timeline(output / "timeline.jsonl", output / "timeline.png")
            mismatch = plain.rl.correction.mismatch
            band = mismatch.band_low, mismatch.band_high
            plot_correction(run, output / "correction.jsonl", output / "correction.png", band)


def place_ranks(config: Config, topology: Topology, stack: ExitStack) -> Placement | None:
    """Keep the ranks off the cores or devices that the config reserves for the engine; return None if they share.

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
    """Start the engine of a config; return None if the run does not sample."""
    if not config.has_engine:
        return None
    output = Path(config.train_parameters.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    arguments = config.engine_arguments(topology.is_cuda)
    if config.rl is not None and config.engine.inference == "vllm":
        description = description_of(Path(config.model)) or {}
        arguments = {RETURN_ROUTES: has_experts(description), **arguments}
    engine = stack.enter_context(
        SamplingEngine(
            config.model,
            replace(
                config.engine,
                engine_args={},
                sampling_params=config.evaluation.sampling_params,
                chat=config.chat,
            ),
            topology=topology,
            devices=None if placement is None else placement.engine,
            log_path=output / "sampler.log",
            **arguments,
        )
    )
    if topology.is_cuda:
        put_to_sleep(engine, config.engine.turn.sleep)
    return engine


def open_reward_workers(
    config: Config, topology: Topology, stack: ExitStack, engine: SamplingEngine | None
) -> WorkerPool | None:
    """Start the worker processes for the reward functions of a config."""
    rl = config.rl
    has_rewards = (rl is not None and rl.all_rewards) or config.held_out_rewards
    size = "auto" if rl is None else rl.reward.reward_workers
    if not has_rewards or size == 0:
        return None
    output = Path(config.train_parameters.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    num_workers = WorkerPool.auto_size(topology.local_world_size) if size == "auto" else size
    if rl is not None and engine is not None and engine.local is not None:
        # The rank with the engine scores the rollouts of all ranks that the engine serves.
        num_workers *= engine.engine_ranks.ranks_per_engine
    return stack.enter_context(WorkerPool(num_workers, output / "rewards.log"))
