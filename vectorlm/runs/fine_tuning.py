"""A whole run on a dataset, from its config to the final model: fine-tuning, a reward model, or preferences."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import nn

from vectorlm.algorithms.preference import PAIR_LOSSES
from vectorlm.data.loader import StepLoader
from vectorlm.ranks.topology import Topology
from vectorlm.rl.models import disable_dropout, require_quiet
from vectorlm.runs.config.schema import Config
from vectorlm.runs.output import export, finish, open_recorder
from vectorlm.runs.preflight.checked import CheckedConfig
from vectorlm.runs.start import Run, open_run
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.loop import FineTuningLoop
from vectorlm.train.objective import NextTokens, Objective, Scorer
from vectorlm.train.optimizer_step import OptimizerStep
from vectorlm.train.pairs import Completions, GoodAndBad, PreferencePairs, RewardPairs, Steps
from vectorlm.train.recorder import OnStep


def finetune(
    config: Config | CheckedConfig, topology: Topology | None = None, on_step: OnStep | None = None
) -> None:
    """Train as `config` says and leave everything in its ``output_dir``; called on every rank.

    The folder then holds ``final-model``, ``metrics.jsonl``, ``samples.jsonl``, ``run.png``, ``config.yaml``,
    ``run.json`` and, with checkpointing, ``checkpoints``. A run that was killed resumes from its last checkpoint.

    Args:
        config: The whole run; one that was not checked is checked by rank 0 for all.
        topology: This rank's place, read from the environment when None.
        on_step: As for `vectorlm.finetune`.

    Raises:
        ConfigError: The config cannot be carried out, or needs more memory than there is.
        CheckpointError: The checkpoints in ``output_dir`` are of another run, or a node does not see them.
        NonFiniteLoss: Training diverged.
    """
    with open_run(config, topology) as run:
        loop = _make_loop(run, on_step)
        loop.run()
        finish(run, loop.optimizer_step.model, loop.recorder, loop.step)


def _make_loop(run: Run, on_step: OnStep | None) -> FineTuningLoop:
    settings, data = run.config.train_parameters, run.config.text
    train_loader = _loader(run, data.train_ds, is_training=True)
    eval_loaders = {name: _loader(run, path, is_training=False) for name, path in data.held_out.items()}
    num_steps = settings.loop.epochs * len(train_loader)
    model = run.load_model()
    if run.config.examples != "texts":
        disable_dropout(model)
    optimizer = run.make_optimizer(model)
    schedule = run.make_schedule(optimizer, num_steps)
    frequency = settings.loop.save_frequency
    steps_per_epoch = len(train_loader)

    def end_epoch(epoch: int) -> None:
        if settings.keep.epoch_models:
            export(run, model, f"epoch-{epoch}-model", epoch * steps_per_epoch)

    recorder = open_recorder(
        run,
        run.make_turn(model, optimizer),
        num_steps=num_steps,
        save_every=round(frequency if frequency > 1 else max(1, frequency * steps_per_epoch)),
        num_examples=train_loader.num_examples,
        end_epoch=end_epoch,
        on_step=on_step,
    )
    held_out = zip(data.held_out.values(), eval_loaders.values(), strict=True)
    with recorder.timer.span("time/reference_s") if run.config.preference else nullcontext():
        objective, why_padded = _objective(run, model, [(data.train_ds, train_loader), *held_out])
    loop = FineTuningLoop(
        optimizer_step=OptimizerStep(
            model, optimizer, schedule, settings.loop.max_grad_norm, run.topology, "model"
        ),
        objective=objective,
        train_loader=train_loader,
        eval_loaders=eval_loaders,
        settings=settings.loop,
        recorder=recorder,
    )
    if why_padded is not None and run.config.examples == "texts" and train_loader.has_texts_in_rows:
        # Laid end to end, each would be computed by itself.
        why_padded = f"{why_padded}; the texts that were packed into a row see those before them"
    recorder.say_padded(why_padded)
    return loop


def _objective(
    run: Run, model: nn.Module, loaders: Sequence[tuple[str, StepLoader]]
) -> tuple[Objective, str | None]:
    """Return what the run minimises, and why rows are padded, None where they are not.

    `loaders` get the reference's log-probabilities of the folders that they read.
    """
    packs, ignore_index = run.config.train_parameters.model.pack_rows, run.config.text.ignore_index
    if (reward_model := run.config.reward_model) is not None:
        scorer = Scorer(model, packs=packs, device=run.topology.device, context=run.context)
        require_quiet("reward model", model, scorer)
        if reward_model.step_separator is not None:
            return Steps(scorer, ignore_index), scorer.why_padded
        return RewardPairs(scorer, reward_model.center_coef, ignore_index), scorer.why_padded
    language_model = LanguageModel(model, packs=packs, device=run.topology.device, context=run.context)
    preference = run.config.preference
    if preference is None:
        return NextTokens(language_model, ignore_index), language_model.why_padded
    require_quiet("policy", model, language_model)
    spec = PAIR_LOSSES.get(preference.loss)
    averages = spec is not None and spec.averages
    if preference.length_normalised is not None:
        averages = preference.length_normalised
    completions = Completions(language_model, averages, ignore_index)
    if spec is None or spec.needs_reference:
        # The model is the reference now: a checkpoint is loaded later.
        for path, loader in loaders:
            reading = _loader(run, path, is_training=False)
            loader.references = completions.table(reading, loader.num_examples)
    if spec is None:
        return GoodAndBad(completions, preference), language_model.why_padded
    return PreferencePairs(completions, spec, preference), language_model.why_padded


def _loader(run: Run, path: str, *, is_training: bool) -> StepLoader:
    settings, data = run.config.train_parameters, run.config.text
    if not is_training:
        return run.make_loader(path, data.ignore_index, data.eval_bs or data.train_bs, shuffle=False)
    num_micro_batches = settings.loop.gradient_accumulation_steps
    return run.make_loader(path, data.ignore_index, data.train_bs, num_micro_batches, shuffle=True)
