"""What a run leaves behind: its metrics, checkpoints, evaluations and models."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig

from vectorlm.errors import CheckpointError, ConfigError
from vectorlm.ranks.engine_ranks import capture, results_or_first_error
from vectorlm.report.card import card_of
from vectorlm.report.metrics import FanOut, JsonlSink, ProgressSink, Sink
from vectorlm.report.profile import ProfileSink, short_run
from vectorlm.report.runs import save_start
from vectorlm.report.trackers import Guarded, WandbSink, open_trackers
from vectorlm.rl.evaluation.evaluator import Evaluator, Play
from vectorlm.rl.rewards.function import RewardFunction
from vectorlm.rl.rewards.registry import short_name
from vectorlm.runs.config.load import save_config
from vectorlm.runs.config.schema import SamplerSettings
from vectorlm.runs.config.setting import to_plain
from vectorlm.runs.preflight.resume import Resumption, find_resumption, identity_of
from vectorlm.runs.start import Run
from vectorlm.train.checkpoint.export import export_model
from vectorlm.train.checkpoint.folder import folder_of, mark_finished, require_shared
from vectorlm.train.checkpoint.state import CheckpointStore, load_weights
from vectorlm.train.device_turn import DeviceTurn
from vectorlm.train.recorder import EarlyStopping, OnStep, Recorder, Timer


def open_recorder(
    run: Run,
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
    settings = run.config.train_parameters
    if settings.checkpointing_enabled:
        require_shared(settings.output_dir, run.topology)
    resumption = _find_resumption(run, num_examples)
    resume_step = None if resumption is None else resumption.step
    timer = _make_timer(run, num_steps - (resume_step or 0))
    if run.engine is not None:
        # The engine loads beside the model; what is left of that is no part of the first evaluation.
        with timer.span("time/start_s"):
            run.engine.wait_until_ready()
    sink, say = _open_sinks(run, num_steps, resumption, timer)
    best_metric = settings.keep.best_metric
    stopping = EarlyStopping(
        best_metric or ("eval/loss" if run.config.rl is None else "eval/accuracy"),
        settings.keep.early_stopping_patience,
        settings.keep.early_stopping_min_delta,
        is_named=best_metric is not None,
        keeps_best=settings.keep.keep_best,
        mode=settings.keep.best_metric_mode,
        say=say,
    )
    store = None
    if settings.checkpointing_enabled:
        store = CheckpointStore(
            run.output / "checkpoints",
            identity_of(run.config, run.topology.world_size, num_examples),
            settings.keep.keep_checkpoints,
            best_step=lambda: stopping.best_step,
        )
    sampler = settings.sampler
    return Recorder(
        num_steps=num_steps,
        sink=sink,
        say=say,
        evaluation=_make_evaluator(run, turn, resume_step, say, play or {}, stopping.falling),
        evaluate_every=(sampler and sampler.evaluation.sample_frequency) or num_steps,
        checkpoints=store,
        save_every=save_every,
        resume_step=resume_step,
        stopping=stopping,
        timer=timer,
        on_step=on_step,
        end_epoch=end_epoch,
    )


def _make_timer(run: Run, num_steps: int) -> Timer:
    """Return what times the phases; where a run of `num_steps` is profiled, it waits for the device's own work."""
    profile_steps = run.config.train_parameters.profile.profile_steps
    if (problem := short_run(profile_steps, num_steps)) is not None:
        rule, fix = problem
        raise ConfigError(f"train_parameters.profile_steps={profile_steps} {rule}. {fix}")
    if not (profile_steps and run.topology.is_cuda):
        return Timer()

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return Timer(clock)


def _make_evaluator(
    run: Run,
    turn: DeviceTurn | None,
    resume_step: int | None,
    say: Callable[[str], None],
    play: Mapping[str, Play],
    falling: dict[str, bool],
) -> Evaluator | None:
    """Return what answers held-out prompts; None without any."""
    settings = run.config.train_parameters
    sampler = settings.sampler
    if turn is None or sampler is None:
        return None
    run_tasks = _make_tasks(run, turn, sampler, falling) if sampler.evaluation.tasks else None
    if run_tasks is None and not run.checked.evaluation_prompts:
        return None
    timeout_s = sampler.engine.timeout_s

    def function(name: str) -> RewardFunction:
        return RewardFunction(name, run.reward_workers, timeout_s=timeout_s, stops_at_error=True)

    return Evaluator(
        turn,
        run.checked.evaluation_prompts,
        samples_path=settings.samples_path if run.topology.is_main else None,
        resume_step=resume_step,
        of_source={source: function(name) for source, name in run.config.held_out_rewards.items()},
        further={short_name(name): function(name) for name in sampler.evaluation.further_rewards},
        at_k=sampler.evaluation.at_k,
        play=play,
        # The default of vLLM, and of the other backends.
        max_tokens=sampler.engine.sampling_params.get("max_tokens", 16) or math.inf,
        run_tasks=run_tasks,
        say=say,
    )


def _make_tasks(
    run: Run, turn: DeviceTurn, sampler: SamplerSettings, falling: dict[str, bool]
) -> Callable[[], dict[str, float]]:
    """Return what runs the harness's tasks on the engine, on all ranks alike, and notes in `falling` which fall."""
    from vectorlm.rl.evaluation import harness

    tasks = harness.load_tasks(sampler.evaluation.tasks, "train_parameters.sampler.tasks")
    longest = run.config.engine_arguments(run.topology.is_cuda).get("max_model_len")
    if longest is None:
        longest = harness.context_length(AutoConfig.from_pretrained(run.config.model), run.tokenizer)
    model = harness.EngineLM(turn.engine, run.tokenizer, longest)

    def answer() -> dict[str, float]:
        found = harness.run_tasks(model, tasks)[0]
        falling.update(harness.falling_of(found))
        return harness.scores_of(found["results"])

    return answer


def finish(run: Run, model: nn.Module, recorder: Recorder, step: int) -> None:
    """Write the final model after the last `step`; called on all ranks, and the model holds its weights then."""
    settings = run.config.train_parameters
    checkpoints = run.output / "checkpoints"
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
    recorder.say(f"writing the model of step {step} to {run.output / 'final-model'}")
    export(run, model, "final-model", step)
    if run.topology.is_main and settings.checkpointing_enabled:
        mark_finished(checkpoints, recorder.stopping.is_over)


def export(run: Run, model: nn.Module, name: str, step: int) -> None:
    """Write the model after `step` into the folder `name` of the run; called on all ranks."""
    is_adapter = run.config.train_parameters.lora_peft_config is not None
    card = card_of(run.output, step, is_adapter=is_adapter) if run.topology.is_main else None
    export_model(model, run.tokenizer, run.output / name, card)


def _find_resumption(run: Run, num_examples: int | None) -> Resumption | None:
    """Look for checkpoints on rank 0: a shared file system may show the other ranks an older state."""
    found: list[Any] = [None]
    if run.topology.is_main:
        world_size = run.topology.world_size
        found = [capture(lambda: find_resumption(run.config, world_size, num_examples))]
    dist.broadcast_object_list(found)
    (resumption,) = results_or_first_error(found)
    return resumption


def _open_sinks(
    run: Run, num_steps: int, resumption: Resumption | None, timer: Timer
) -> tuple[FanOut, Callable[[str], None]]:
    """Open what takes metrics, and what shows text, on rank 0; the other ranks write nothing."""
    if not run.topology.is_main:
        return FanOut([]), lambda text: None
    run.output.mkdir(parents=True, exist_ok=True)
    save_config(run.config, run.output / "config.yaml")
    resume_step = None if resumption is None else resumption.step
    first_step = resume_step or 0
    save_start(
        run.output,
        run.topology.world_size,
        run.topology.device,
        num_steps=num_steps,
        first_step=first_step,
    )
    progress = ProgressSink(num_steps, initial_step=first_step)
    sinks: list[Sink] = [JsonlSink(run.output / "metrics.jsonl", resume_step), progress]
    if run.config.enable_wandb_logging:
        id_file = run.output / "wandb_id"
        sinks.append(
            WandbSink(run.config.wandb_config, to_plain(run.config), id_file, resumption is not None)
        )
    sinks += open_trackers(run.config.trackers, run.output, to_plain(run.config), resume_step)
    sinks[2:] = [Guarded(sink, progress.say) for sink in sinks[2:]]
    if num_traced := run.config.train_parameters.profile.profile_steps:
        sinks.append(
            ProfileSink(run.output, num_traced, timer=timer, initial_step=first_step, say=progress.say)
        )
    if resumption is not None:
        progress.say(f"resuming {run.output} from step {resume_step}; delete its checkpoints to start over")
        for change in resumption.changes:
            progress.say(f"  from here on {change}")
        if first_step >= num_steps:
            progress.say(f"  all {num_steps} steps are done: the weights of step {first_step} are exported")
    for sink in sinks:
        # Each gets the error of a run that fails, and the others are closed if one cannot be.
        run.stack.enter_context(sink)
    return FanOut(sinks), progress.say
