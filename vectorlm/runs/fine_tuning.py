"""Run fine-tuning, reward model training or preference training, from the config to the final model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from vectorlm.algorithms.preference import PAIR_LOSSES
from vectorlm.data.loader import StepLoader
from vectorlm.ranks.topology import Topology
from vectorlm.rl.models import disable_dropout, require_quiet
from vectorlm.runs.config.schema import Config
from vectorlm.runs.output import export, finish, open_recorder
from vectorlm.runs.preflight.checked import CheckedConfig
from vectorlm.runs.start import Run, open_run
from vectorlm.train.language_model import LanguageModel, inner_model
from vectorlm.train.loop import FineTuningLoop
from vectorlm.train.objective import (
    Completions,
    GoodAndBad,
    NextTokens,
    Objective,
    PreferencePairs,
    RewardPairs,
    Scorer,
    Steps,
)
from vectorlm.train.optimizer_step import OptimizerStep
from vectorlm.train.routes import routers_of, weigh_balance


def finetune(
    config: Config | CheckedConfig, topology: Topology | None = None, callbacks: Sequence[Any] = ()
) -> None:
    """Train on this rank and write the results to the config's ``output_dir``. Call it on every rank.

    The run writes ``final-model``, ``metrics.jsonl``, ``samples.jsonl``, ``run.png``, ``config.yaml``, ``run.json``
    and, with checkpointing, ``checkpoints``. A run that was killed resumes from its last checkpoint.

    Args:
        config: The config of the run. Rank 0 checks it unless it is checked already.
        topology: This rank's position; None reads it from the environment.
        callbacks: See `vectorlm.reinforce`.

    Raises:
        ConfigError: The config cannot run, or needs more memory than the machine has.
        CheckpointError: The checkpoints in ``output_dir`` belong to another run, or a node cannot read them.
        NonFiniteLoss: Training diverged.
    """
    with open_run(config, topology) as run:
        loop = _make_loop(run, callbacks)
        loop.run()
        finish(run, loop.optimizer_step.model, loop.recorder, loop.step)


def _make_loop(run: Run, callbacks: Sequence[Any]) -> FineTuningLoop:
    settings, data = run.config.train_parameters, run.config.text
    num_micro_batches = settings.loop.gradient_accumulation_steps

    def read(path: str) -> StepLoader:
        return run.make_loader(path, data.ignore_index, data.eval_bs or data.train_bs, shuffle=False)

    train_loader = run.make_loader(
        data.train_ds, data.ignore_index, data.train_bs, num_micro_batches, shuffle=True
    )
    eval_loaders = {name: read(path) for name, path in data.held_out.items()}
    steps_per_epoch, frequency = len(train_loader), settings.loop.save_frequency
    num_steps = settings.loop.epochs * steps_per_epoch
    model = run.load_model()
    if run.config.examples != "texts":
        disable_dropout(model)
    optimizer = run.make_optimizer(model)
    schedule = run.make_schedule(optimizer, num_steps)

    def end_epoch(epoch: int) -> None:
        if settings.keep.epoch_models:
            export(run, model, f"epoch-{epoch}-model", epoch * steps_per_epoch)

    recorder = open_recorder(
        run,
        run.make_turn(model, optimizer),
        model,
        num_steps=num_steps,
        save_every=round(frequency if frequency > 1 else max(1, frequency * steps_per_epoch)),
        num_examples=train_loader.num_examples,
        end_epoch=end_epoch,
        callbacks=callbacks,
        schedule=schedule,
    )
    loaders = [
        (data.train_ds, train_loader),
        *zip(data.held_out.values(), eval_loaders.values(), strict=True),
    ]
    with recorder.timer.span("time/reference_s") if run.config.preference else nullcontext():
        objective, why_padded = _objective(run, model, loaders, read)
    if why_padded is not None and run.config.examples == "texts" and train_loader.has_texts_in_rows:
        # Without padding, each packed text would attend only to itself.
        why_padded = f"{why_padded}; texts that were packed into one row attend to the texts before them"
    recorder.say_padded(why_padded)
    if run.config.reward_model is None:
        causal = inner_model(model)
        weigh_balance(routers_of(causal), causal, settings.model.router_aux_loss_coef)
    max_norm = settings.loop.max_grad_norm
    is_cast = run.config.train_parameters.model.computes_in_bf16(run.topology.is_cuda)
    optimizer_step = OptimizerStep(model, optimizer, schedule, max_norm, run.topology, "model", is_cast)
    return FineTuningLoop(
        optimizer_step=optimizer_step,
        objective=objective,
        train_loader=train_loader,
        eval_loaders=eval_loaders,
        settings=settings.loop,
        recorder=recorder,
    )


def _objective(
    run: Run, model: nn.Module, loaders: Sequence[tuple[str, StepLoader]], read: Callable[[str], StepLoader]
) -> tuple[Objective, str | None]:
    """Return the objective of the run, and the reason for padding rows (None: they are packed).

    `loaders` are pairs of a folder and its loader; the loaders get the reference's log-probabilities.
    """
    packs, ignore_index = run.config.train_parameters.model.pack_rows, run.config.text.ignore_index
    if (reward_model := run.config.reward_model) is not None:
        scorer = Scorer(model, packs=packs, device=run.topology.device, context=run.context)
        require_quiet("reward model", model, scorer)
        if reward_model.step_separator is not None:
            return Steps(scorer, ignore_index), scorer.why_padded
        return RewardPairs(scorer, reward_model.center_coef, ignore_index), scorer.why_padded
    language_model = LanguageModel(
        model, packs=packs, device=run.topology.device, context=run.context, image_tokens=run.image_tokens
    )
    preference = run.config.preference
    if preference is None:
        return NextTokens(language_model, ignore_index), language_model.why_padded
    require_quiet("policy", model, language_model)
    spec, averages = PAIR_LOSSES.get(preference.loss), preference.length_normalised
    if averages is None:
        averages = spec is not None and spec.averages
    completions = Completions(language_model, averages, ignore_index)
    if spec is None or spec.needs_reference:
        # Until a checkpoint is loaded, the model is the reference.
        for path, loader in loaders:
            loader.references = completions.table(read(path), loader.num_examples)
    if spec is None:
        return GoodAndBad(completions, preference), language_model.why_padded
    return PreferencePairs(completions, spec, preference), language_model.why_padded
