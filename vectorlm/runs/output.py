"""Open the outputs of a run (metrics, checkpoints, evaluations) and write its models."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from vectorlm.errors import CheckpointError, ConfigError
from vectorlm.report.card import card_of
from vectorlm.report.metrics import (
    FanOut,
    JsonlSink,
    ProfileSink,
    ProgressSink,
    Sink,
    open_trackers,
    open_wandb,
    short_run,
)
from vectorlm.report.runs import save_start
from vectorlm.rl.evaluation.evaluator import Evaluator, Play, seeded
from vectorlm.rl.rewards.function import RewardFunction
from vectorlm.rl.rewards.registry import short_name
from vectorlm.rl.rewards.runner import Reward
from vectorlm.runs.config.load import save_config
from vectorlm.runs.config.setting import to_plain
from vectorlm.runs.preflight.resume import Resumption, find_resumption, identity_of
from vectorlm.runs.start import Run, on_main
from vectorlm.sampling.weights.model_size import auto_class
from vectorlm.train.callbacks import Callbacks, RunControl
from vectorlm.train.checkpoint.export import export_model
from vectorlm.train.checkpoint.folder import folder_of, mark_finished, require_shared
from vectorlm.train.checkpoint.hub import HubUploads
from vectorlm.train.checkpoint.state import CheckpointStore, load_weights
from vectorlm.train.handover import DeviceTurn
from vectorlm.train.language_model import inner_model
from vectorlm.train.optimizer_step import Schedule
from vectorlm.train.recorder import EarlyStopping, Recorder, Timer

MODEL_OF_STEP = "step-{}-model"
"""Folder of a checkpoint's model until it is uploaded. Folders of `vectorlm export` have leading zeros."""


def open_recorder(
    run: Run,
    turn: DeviceTurn | None,
    model: nn.Module,
    *,
    num_steps: int,
    save_every: int,
    num_examples: int | None = None,
    end_epoch: Callable[[int], None] = lambda epoch: None,
    play: Mapping[str, Play] | None = None,
    callbacks: Sequence[Any] = (),
    schedule: Schedule,
    rewards: Mapping[str, Reward] | None = None,
) -> Recorder:
    """Open metrics, checkpoints, the evaluation and the callbacks, which control `schedule`.

    `num_examples` is the size of a training dataset, which must be the same when a run resumes. `play` has functions
    that sample rollouts for held-out prompts with an environment, by source. `rewards` are functions that replace the
    rewards of these names.
    """
    settings = run.config.train_parameters
    if settings.checkpointing_enabled:
        require_shared(settings.output_dir, run.topology)
    # A shared file system may show the other ranks an older state.
    resumption: Resumption | None = on_main(
        run.topology, lambda: find_resumption(run.config, run.topology.world_size, num_examples)
    )
    resume_step = None if resumption is None else resumption.step
    profile_steps = settings.profile.profile_steps
    if resumption is None and (problem := short_run(profile_steps, num_steps)) is not None:
        rule, fix = problem
        raise ConfigError(f"train_parameters.profile_steps={profile_steps} {rule}. {fix}")
    timer = Timer(_synchronised_clock) if profile_steps and run.topology.is_cuda else Timer()
    if run.engine is not None:
        # The engine loads at the same time as the model. The first evaluation's time must not include the rest.
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
            model_parallel=run.topology.model_parallel,
        )
    uploads = _open_uploads(run, resume_step, say)
    recorder = Recorder(
        num_steps=num_steps,
        sink=sink,
        say=say,
        evaluation=_make_evaluator(run, turn, resume_step, say, play or {}, stopping.falling, rewards or {}),
        evaluate_every=run.config.evaluation.every or num_steps,
        checkpoints=store,
        save_every=save_every,
        resume_step=resume_step,
        stopping=stopping,
        timer=timer,
        callbacks=Callbacks(
            [*run.config.callbacks, *callbacks],
            RunControl(run.output, schedule, saves_checkpoints=store is not None),
        ),
        end_epoch=end_epoch,
        uploads=uploads,
        after_save=partial(_push_checkpoint, run, model, uploads),
    )
    run.stack.callback(recorder.close)
    return recorder


def _open_uploads(run: Run, resume_step: int | None, say: Callable[[str], None]) -> HubUploads | None:
    """Open the uploads on rank 0, and queue the checkpoints' models that a killed run did not upload."""
    push = run.config.push_to_hub
    if push is None or not run.topology.is_main:
        return None
    uploads = run.stack.enter_context(HubUploads(push, say))
    if push.checkpoints and resume_step is not None:
        steps = (path.name.split("-")[1] for path in run.output.glob(MODEL_OF_STEP.format("[1-9]*")))
        for step in sorted({int(step) for step in steps if step.isdecimal()}):
            folder = run.output / MODEL_OF_STEP.format(step)
            # The model of `resume_step` is written again.
            if step < resume_step and folder.is_dir():
                uploads.push(folder, f"step-{step}", deletes_folder=True)
    return uploads


def _synchronised_clock() -> float:
    """Return the time after the device's pending work, because phases must include the work that they started."""
    torch.cuda.synchronize()
    return time.perf_counter()


def _make_evaluator(
    run: Run,
    turn: DeviceTurn | None,
    resume_step: int | None,
    say: Callable[[str], None],
    play: Mapping[str, Play],
    falling: dict[str, bool],
    rewards: Mapping[str, Reward],
) -> Evaluator | None:
    """Return the evaluator of held-out prompts and tasks; None if there are none."""
    if turn is None:
        return None
    run_tasks: Callable[[], dict[str, float]] | None = None
    rl = run.config.rl
    if run.config.evaluation.tasks:
        from vectorlm.rl.evaluation import harness

        tasks = harness.load_tasks(run.config.evaluation.tasks, "evaluation.tasks")
        longest = run.config.engine_arguments(run.topology.is_cuda).get("max_model_len")
        if longest is None:
            longest = harness.context_length(AutoConfig.from_pretrained(run.config.model), run.tokenizer)
        model = harness.EngineLM(turn.engine, run.tokenizer, longest)

        def answer() -> dict[str, float]:
            found = harness.run_tasks(model, tasks)[0]
            falling.update(harness.falling_of(found))
            return harness.scores_of(found["results"])

        run_tasks = answer

    elif not run.checked.evaluation_prompts:
        return None

    def function(name: str) -> RewardFunction:
        right_from = run.config.threshold_of(name)
        return RewardFunction(
            rewards.get(name, name),
            run.reward_workers,
            timeout_s=run.config.held_out_timeout_s,
            stops_at_error=rl is None or rl.reward.on_reward_error == "stop",
            right_from=right_from,
        )

    return Evaluator(
        turn,
        run.checked.evaluation_prompts,
        samples_path=run.config.samples_path if run.topology.is_main else None,
        resume_step=resume_step,
        of_source={source: function(name) for source, name in run.config.held_out_rewards.items()},
        weights=run.config.evaluation_rewards,
        further={short_name(name): function(name) for name in [*run.config.evaluation_rewards][1:]},
        at_k=run.config.evaluation.at_k,
        play=play,
        sampling_params=seeded(
            run.config.evaluation.sampling_params,
            run.config.train_parameters.seed,
            len(run.checked.evaluation_prompts),
        ),
        # 16 is the default of vLLM and of the other backends.
        max_tokens=run.config.evaluation.sampling_params.get("max_tokens", 16) or math.inf,
        run_tasks=run_tasks,
        say=say,
        topology=run.topology,
    )


def _push_checkpoint(run: Run, model: nn.Module, uploads: HubUploads | None, step: int) -> None:
    """Upload the model of a checkpoint; called on all ranks, of which only rank 0 has `uploads`."""
    push = run.config.push_to_hub
    if push is not None and push.checkpoints:
        export(run, model, name := MODEL_OF_STEP.format(step), step)
        if uploads is not None:
            uploads.push(run.output / name, f"step-{step}", deletes_folder=True)


def finish(run: Run, model: nn.Module, recorder: Recorder, step: int) -> None:
    """Write the final model after the last `step` and leave its weights in `model`. Call it on all ranks."""
    settings = run.config.train_parameters
    checkpoints = run.output / "checkpoints"
    best = recorder.stopping.best_step
    if settings.keep.final_model == "best" and best is not None and best != step:
        recorder.say(f"the final model has the weights of the best step, {best}")
        folder = folder_of(checkpoints, best)
        if not folder.is_dir():
            raise CheckpointError(
                f"train_parameters.final_model='best' needs the best checkpoint, {folder}, which does not exist. "
                "Set it to last, and the same command exports the last weights."
            )
        load_weights(folder, model)
        step = best
    recorder.say(f"writing the model of step {step} to {run.output / 'final-model'}")
    export(run, model, "final-model", step)
    if recorder.uploads is not None:
        recorder.uploads.push(run.output / "final-model")
        # The same command repeats an upload that was interrupted, until the run is finished.
        recorder.uploads.wait()
    if run.topology.is_main and settings.checkpointing_enabled:
        # A run that a callback stopped continues if its length is raised.
        mark_finished(checkpoints, recorder.stopping.is_over and not recorder.stopping.is_asked)


def export(run: Run, model: nn.Module, name: str, step: int) -> None:
    """Write the model of `step` to the folder `name` of the run. Call it on all ranks."""
    is_adapter = run.config.train_parameters.lora_peft_config is not None
    auto = auto_class(inner_model(model).config).__name__
    card = card_of(run.output, step, is_adapter=is_adapter, auto=auto) if run.topology.is_main else None
    export_model(model, run.tokenizer, run.output / name, card)


def _open_sinks(
    run: Run, num_steps: int, resumption: Resumption | None, timer: Timer
) -> tuple[FanOut, Callable[[str], None]]:
    """Return the sinks of metrics and the function that prints text; both do nothing on ranks other than 0."""
    if not run.topology.is_main:
        return FanOut([]), lambda text: None
    run.output.mkdir(parents=True, exist_ok=True)
    save_config(run.config, run.output / "config.yaml")
    resume_step = None if resumption is None else resumption.step
    first_step = resume_step or 0
    save_start(
        run.output, run.topology.world_size, run.topology.device, num_steps=num_steps, first_step=first_step
    )
    progress = ProgressSink(num_steps, initial_step=first_step)
    sinks: list[Sink] = [JsonlSink(run.output / "metrics.jsonl", resume_step), progress]
    plain = to_plain(run.config)
    if run.config.enable_wandb_logging:
        id_file = run.output / "wandb_id"
        is_resumed = resumption is not None
        sinks.append(open_wandb(run.config.wandb_config, plain, id_file, is_resumed, progress.say))
    sinks += open_trackers(run.config.trackers, run.output, plain, resume_step, progress.say)
    num_traced = run.config.train_parameters.profile.profile_steps
    is_too_late = short_run(num_traced, num_steps - first_step) is not None
    if num_traced and not is_too_late:
        sinks.append(
            ProfileSink(run.output, num_traced, timer=timer, initial_step=first_step, say=progress.say)
        )
    if resumption is not None:
        progress.say(f"resuming {run.output} from step {resume_step}; delete its checkpoints to start over")
        for change in resumption.changes:
            progress.say(f"  from here on {change}")
        if first_step >= num_steps:
            progress.say(f"  all {num_steps} steps are done; exporting the weights of step {first_step}")
        if is_too_late:
            progress.say("  train_parameters.profile_steps has no effect: too few steps are left to record")
    for sink in sinks:
        # The stack closes every sink, with the run's error, even if another one fails to close.
        run.stack.enter_context(sink)
    return FanOut(sinks), progress.say
