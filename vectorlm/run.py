"""What surrounds the loop of a run, the same for fine-tuning and reinforcement learning."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, set_seed
from transformers.utils.logging import disable_progress_bar

from vectorlm.checkpoint.export import export_model
from vectorlm.checkpoint.folder import (
    folder_of,
    held,
    mark_finished,
    naming_the_full_disk,
    require_shared,
)
from vectorlm.checkpoint.state import CheckpointStore, load_weights
from vectorlm.config import Config, load_config, save_config, to_plain
from vectorlm.config.schema import SamplerSettings
from vectorlm.data.loader import Collator, StepLoader, load_dataset
from vectorlm.errors import CheckpointError, ConfigError
from vectorlm.lora.folder import continue_lora, load_adapters, merged
from vectorlm.lora.load import add_lora
from vectorlm.lora.options import engine_arguments
from vectorlm.packages import is_installed
from vectorlm.preflight.checked import CheckedConfig, preflight
from vectorlm.preflight.local_model import resolve_model
from vectorlm.preflight.memory import memory_report
from vectorlm.preflight.rehearsal import rehearse
from vectorlm.preflight.resume import Resumption, find_resumption, identity_of, settings_of_rank
from vectorlm.preflight.summary import notes_of
from vectorlm.ranks.engine_ranks import capture, comparable, gather, require_equal, results_or_first_error
from vectorlm.ranks.launcher import process_group
from vectorlm.ranks.placement import Placement, set_affinity, share_cores, split_node
from vectorlm.ranks.topology import Topology
from vectorlm.report.card import card_of
from vectorlm.report.metrics import FanOut, JsonlSink, ProgressSink, Sink
from vectorlm.report.plots import plot_correction, plot_runs, plot_timeline
from vectorlm.report.profile import ProfileSink, short_run
from vectorlm.report.runs import START, RunFolder, save_start
from vectorlm.report.trackers import WandbSink, open_trackers
from vectorlm.rewards.evaluation import Evaluator, Play
from vectorlm.rewards.function import RewardFunction
from vectorlm.rewards.registry import short_name
from vectorlm.train.context import ContextGroup
from vectorlm.train.device_turn import DeviceTurn, put_to_sleep
from vectorlm.train.early_stopping import EarlyStopping
from vectorlm.train.load import load_model, load_scorer, load_tokenizer
from vectorlm.train.nf4 import quantize_blocks, round_blocks
from vectorlm.train.optimizer_step import Schedule
from vectorlm.train.optimizers import make_optimizer
from vectorlm.train.recorder import OnStep, Recorder, Timer
from vectorlm.train.shard import load_sharded
from vectorlm.workers import WorkerPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vectorlm.engine.engine import SamplingEngine


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
            model = merge_of_run(load_adapters(adapters, model), adapters.parent).requires_grad_(True)
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
            load_dataset(path),
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

    def make_recorder(
        self,
        turn: DeviceTurn | None,
        *,
        num_steps: int,
        save_every: int,
        num_examples: int | None = None,
        end_epoch: Callable[[int], None] = lambda epoch: None,
        play: Mapping[str, Play] | None = None,
        on_step: OnStep | None = None,
    ) -> Recorder:
        """Open metrics, checkpoints and evaluation.

        A resumed run must have `num_examples` rows of a training dataset, where it is given. What plays held-out
        prompts that have an environment is in `play`, by their sources.
        """
        settings = self.config.train_parameters
        if settings.checkpointing_enabled:
            require_shared(settings.output_dir, self.topology)
        resumption = self._find_resumption(num_examples)
        resume_step = None if resumption is None else resumption.step
        timer = self._make_timer(num_steps - (resume_step or 0))
        if self.engine is not None:
            # The engine loads beside the model; what is left of that is no part of the first evaluation.
            with timer.span("time/start_s"):
                self.engine.wait_until_ready()
        sink, say = self._open_sinks(num_steps, resumption, timer)
        best_metric = settings.keep.best_metric
        stopping = EarlyStopping(
            best_metric or ("eval/loss" if self.config.rl is None else "eval/accuracy"),
            settings.keep.early_stopping_patience,
            settings.keep.early_stopping_min_delta,
            is_named=best_metric is not None,
            keeps_best=settings.keep.keep_best,
            say=say,
        )
        store = None
        if settings.checkpointing_enabled:
            store = CheckpointStore(
                self.output / "checkpoints",
                identity_of(self.config, self.topology.world_size, num_examples),
                settings.keep.keep_checkpoints,
                best_step=lambda: stopping.best_step,
            )
        sampler = settings.sampler
        return Recorder(
            num_steps=num_steps,
            sink=sink,
            say=say,
            evaluation=self._make_evaluator(turn, resume_step, say, play or {}),
            evaluate_every=(sampler and sampler.evaluation.sample_frequency) or num_steps,
            checkpoints=store,
            save_every=save_every,
            resume_step=resume_step,
            stopping=stopping,
            timer=timer,
            on_step=on_step,
            end_epoch=end_epoch,
        )

    def _make_timer(self, num_steps: int) -> Timer:
        """Return what times the phases; where a run of `num_steps` is profiled, it waits for the device's own work."""
        profile_steps = self.config.train_parameters.profile.profile_steps
        if (problem := short_run(profile_steps, num_steps)) is not None:
            rule, fix = problem
            raise ConfigError(f"train_parameters.profile_steps={profile_steps} {rule}. {fix}")
        if not (profile_steps and self.topology.is_cuda):
            return Timer()

        def clock() -> float:
            torch.cuda.synchronize()
            return time.perf_counter()

        return Timer(clock)

    def _make_evaluator(
        self,
        turn: DeviceTurn | None,
        resume_step: int | None,
        say: Callable[[str], None],
        play: Mapping[str, Play],
    ) -> Evaluator | None:
        """Return what answers held-out prompts; None without any."""
        settings = self.config.train_parameters
        sampler = settings.sampler
        if turn is None or sampler is None:
            return None
        run_tasks = self._make_tasks(turn, sampler) if sampler.evaluation.tasks else None
        if run_tasks is None and not self.checked.evaluation_prompts:
            return None
        timeout_s = sampler.engine.timeout_s

        def function(name: str) -> RewardFunction:
            return RewardFunction(name, self.reward_workers, timeout_s=timeout_s, stops_at_error=True)

        return Evaluator(
            turn,
            self.checked.evaluation_prompts,
            samples_path=settings.samples_path if self.topology.is_main else None,
            resume_step=resume_step,
            of_source={source: function(name) for source, name in self.config.held_out_rewards.items()},
            further={short_name(name): function(name) for name in sampler.evaluation.further_rewards},
            at_k=sampler.evaluation.at_k,
            play=play,
            # The default of vLLM, and of the other backends.
            max_tokens=sampler.engine.sampling_params.get("max_tokens", 16) or math.inf,
            run_tasks=run_tasks,
            say=say,
        )

    def _make_tasks(self, turn: DeviceTurn, sampler: SamplerSettings) -> Callable[[], dict[str, float]]:
        """Return what runs the harness's tasks on the engine, on all ranks alike."""
        from vectorlm.rewards import harness

        tasks = harness.load_tasks(sampler.evaluation.tasks, "train_parameters.sampler.tasks")
        longest = sampler.engine.engine_args.get("max_model_len")
        if longest is None and self.config.rl is not None:
            longest = self.config.train_parameters.max_seq_len
        if longest is None:
            longest = harness.context_length(AutoConfig.from_pretrained(self.config.model), self.tokenizer)
        model = harness.EngineLM(turn.engine, self.tokenizer, longest)
        return lambda: harness.scores_of(harness.run_tasks(model, tasks)[0]["results"])

    def finish(self, model: nn.Module, recorder: Recorder, step: int) -> None:
        """Write the final model after the last `step`; called on all ranks, and the model holds its weights then."""
        settings = self.config.train_parameters
        checkpoints = self.output / "checkpoints"
        best = recorder.stopping.best_step
        if settings.keep.final_model == "best" and best is not None and best != step:
            recorder.say(f"the final model is the best one, of step {best}")
            folder = folder_of(checkpoints, best)
            if not folder.is_dir():
                raise CheckpointError(
                    f"the best checkpoint, {folder}, is gone, and train_parameters.final_model="
                    "'best' needs it. Set it to last, and the same command exports the last weights."
                )
            load_weights(folder, model)
            step = best
        self.export(model, "final-model", step)
        if self.topology.is_main and settings.checkpointing_enabled:
            mark_finished(checkpoints, recorder.stopping.is_over)

    def export(self, model: nn.Module, name: str, step: int) -> None:
        """Write the model after `step` into the folder `name` of the run; called on all ranks."""
        is_adapter = self.config.train_parameters.lora_peft_config is not None
        card = card_of(self.output, step, is_adapter=is_adapter) if self.topology.is_main else None
        export_model(model, self.tokenizer, self.output / name, card)

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
        self, num_steps: int, resumption: Resumption | None, timer: Timer
    ) -> tuple[FanOut, Callable[[str], None]]:
        """Open what takes metrics, and what shows text, on rank 0; the other ranks write nothing."""
        if not self.topology.is_main:
            return FanOut([]), lambda text: None
        self.output.mkdir(parents=True, exist_ok=True)
        save_config(self.config, self.output / "config.yaml")
        resume_step = None if resumption is None else resumption.step
        first_step = resume_step or 0
        save_start(
            self.output,
            self.topology.world_size,
            self.topology.device,
            num_steps=num_steps,
            first_step=first_step,
        )
        progress = ProgressSink(num_steps, initial_step=first_step)
        sinks: list[Sink] = [JsonlSink(self.output / "metrics.jsonl", resume_step), progress]
        if self.config.enable_wandb_logging:
            id_file = self.output / "wandb_id"
            sinks.append(
                WandbSink(self.config.wandb_config, to_plain(self.config), id_file, resumption is not None)
            )
        sinks += open_trackers(self.config.trackers, self.output, to_plain(self.config), resume_step)
        if num_traced := self.config.train_parameters.profile.profile_steps:
            sinks.append(
                ProfileSink(self.output, num_traced, timer=timer, initial_step=first_step, say=progress.say)
            )
        if resumption is not None:
            progress.say(
                f"resuming {self.output} from step {resume_step}; delete its checkpoints to start over"
            )
            for change in resumption.changes:
                progress.say(f"  from here on {change}")
            if first_step >= num_steps:
                progress.say(
                    f"  all {num_steps} steps are done: the weights of step {first_step} are exported"
                )
        return self.stack.enter_context(FanOut(sinks)), progress.say


def merge_of_run(model: Any, run: Path) -> Any:
    """Merge the adapters of `model`, which the run in the folder `run` has trained, if it has; return the base.

    Raises:
        ConfigError: As `vectorlm.lora.folder.merged`.
    """
    settings = run / "config.yaml"
    if settings.is_file() and load_config(settings).train_parameters.model.quantization is not None:
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
            yield Run(checked, topology, engine, load_tokenizer(plain.model), stack, workers, context)
    if topology.is_main and is_installed("matplotlib"):
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
    notes = [f"  note: {note}" for note in (*notes_of(checked.config), *rehearse(checked.config))]
    print(*notes, report, sep="\n", file=sys.stderr, flush=True)
    output = Path(config.train_parameters.output_dir)
    stack.enter_context(held(output))
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
    config: Config, topology: Topology, stack: ExitStack, placement: Placement | None = None, **more: Any
) -> SamplingEngine | None:
    """Start the engine that the config asks for, whose own arguments win over `more`."""
    sampler = config.train_parameters.sampler
    if sampler is None:
        return None
    from vectorlm.engine.engine import SamplingEngine

    settings = sampler.engine
    output = Path(config.train_parameters.output_dir)
    adapters = config.train_parameters.lora_peft_config
    output.mkdir(parents=True, exist_ok=True)
    of_run: dict[str, Any] = (
        {} if config.rl is None else {"max_model_len": config.train_parameters.max_seq_len}
    )
    if settings.inference == "vllm":
        of_run["dtype"] = config.train_parameters.engine_dtype(topology.is_cuda)
        of_run["enable_sleep_mode"] = sampler.turn.sleep != "none"
        if config.rl is not None and config.rl.collect.sampling.get("structured_outputs"):
            # The trainer follows its masks; left alone, vLLM falls back to others.
            of_run["structured_outputs_config"] = {"backend": "xgrammar"}
        if adapters is not None and settings.lora_mode_of_run == "adapter":
            of_run |= engine_arguments(adapters)
    engine = stack.enter_context(
        SamplingEngine(
            config.model,
            replace(settings, engine_args={}),
            topology=topology,
            devices=None if placement is None else placement.engine,
            log_path=output / "sampler.log",
            **{**of_run, **more, **settings.engine_args},
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
