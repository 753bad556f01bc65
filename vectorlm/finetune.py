"""A whole fine-tuning run, from its config to the final model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils.logging import disable_progress_bar

from vectorlm.build import (
    make_exam,
    make_model,
    make_optimizer,
    make_schedule,
    make_store,
    make_turn,
    open_engine,
    open_sinks,
    say_memory,
)
from vectorlm.checkpoint.export import export_model
from vectorlm.checkpoint.state import CheckpointStore
from vectorlm.config import Config
from vectorlm.data.loader import StepLoader, load_dataset
from vectorlm.model.load import load_tokenizer
from vectorlm.ranks.group import process_group
from vectorlm.ranks.topology import Topology
from vectorlm.telemetry.plots import plot_run
from vectorlm.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    say_memory(config, topology)
    # The run has one progress bar, its own.
    disable_progress_bar()
    with ExitStack() as stack:
        stack.enter_context(process_group(topology))
        # First of all: the engine loads in its own process while the ranks load the model.
        engine = open_engine(config, topology, stack)
        tokenizer = load_tokenizer(config.model)
        trainer, resume_step = _build(config, topology, tokenizer, engine, stack)
        trainer.run(resume_step)
        output = Path(config.train_parameters.output_dir)
        export_model(trainer.model, tokenizer, output / "final-model")
    if topology.is_main:
        plot_run(output / "metrics.jsonl", output / "run.png")


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
    model = make_model(config, topology)
    optimizer = make_optimizer(config, model.parameters())
    schedule = make_schedule(config, optimizer, num_steps)
    store = _store(config, topology, num_steps) if settings.checkpointing_enabled else None
    resume_step = store.latest_step() if store else None
    sink, say = open_sinks(config, topology, num_steps, resume_step, stack)
    exam = None
    if engine is not None:
        turn = make_turn(config, topology, engine, model, optimizer)
        exam = make_exam(config, topology, turn, engine, resume_step, say)
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
        ignore_index=config.text.ignore_index,
        exam=exam,
        exam_every=settings.sampler.sample_frequency if settings.sampler else 1,
        store=store,
        save_every=max(1, round(settings.save_frequency * len(train_loader))),
    )
    return trainer, resume_step


def _loader(
    config: Config, topology: Topology, tokenizer: PreTrainedTokenizerBase, *, is_training: bool
) -> StepLoader:
    settings, dataset = config.train_parameters, config.text
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


def _store(config: Config, topology: Topology, num_steps: int) -> CheckpointStore:
    settings, dataset = config.train_parameters, config.text
    return make_store(
        config,
        topology,
        train_ds=dataset.train_ds,
        num_steps=num_steps,
        epochs=settings.epochs,
        global_batch_size=topology.world_size * dataset.train_bs * settings.gradient_accumulation_steps,
        max_seq_len=settings.max_seq_len,
    )
