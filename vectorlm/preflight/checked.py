"""The look at a config before a run starts, by the command or by rank 0; what passes it travels to the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vectorlm.config.schema import Config
from vectorlm.config.value import raise_problems
from vectorlm.data.prompts import check_lengths, read_prompts
from vectorlm.data.source import load_saved
from vectorlm.data.summary import Summary
from vectorlm.encoding import has_chat_template, is_messages
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.packages import is_installed
from vectorlm.preflight.files import file_problems
from vectorlm.preflight.local_model import description_of, own_length, resolve_model
from vectorlm.preflight.packages import package_problems
from vectorlm.preflight.resume import Resumption, find_resumption
from vectorlm.preflight.rewards import reward_problems
from vectorlm.preflight.settings import setting_problems
from vectorlm.types import PromptRecord


@dataclass(frozen=True)
class CheckedConfig:
    """A config that can be carried out, and what was read to find that out; made by `preflight`."""

    config: Config
    """With the folder of its model, and the model's own length for a `max_seq_len` of -1."""
    prompts: Sequence[PromptRecord] = ()
    """Of ``rl.prompts``; each leaves room for an answer."""
    evaluation_prompts: Sequence[PromptRecord] = ()
    """Of ``train_parameters.sampler.prompts``."""
    resumption: Resumption | None = None
    """How the run goes on from the checkpoints in its output folder."""


def preflight(config: Config, world_size: int, num_nodes: int = 1) -> CheckedConfig:
    """Check whether a config can be carried out here; reads each file once, and touches no device.

    Args:
        config: As `load_config` returns it.
        world_size: Number of ranks of the run, on all nodes together.
        num_nodes: Number of machines of the run.

    Raises:
        ConfigError: Lists every problem found, or a prompt cannot be encoded.
        CheckpointError: The checkpoints in the output folder are of another run, or cannot be read.
        DatasetError: A prompt leaves no room for an answer.
        EngineError: The teacher's server does not answer.
    """
    config = resolve_model(config)
    problems = [
        *setting_problems(config, world_size, num_nodes),
        *package_problems(config),
        *file_problems(config),
    ]
    rl, sampler = config.rl, config.train_parameters.sampler
    max_tokens = math.inf
    # These cost more than a minute: they are needed after models are loaded.
    prompts = [] if rl is None else _read(config, "rl.prompts", rl.collect.prompts, problems)
    questions = None if sampler is None else sampler.evaluation.prompts
    evaluation_prompts = (
        [] if questions is None else _read(config, "train_parameters.sampler.prompts", questions, problems)
    )
    try:
        problems += reward_problems(config, prompts, evaluation_prompts)
    except ConfigError as error:
        problems.append(str(error))
    if rl is not None:
        # These import torch, which the check of a config for fine-tuning does without.
        from vectorlm.preflight.rl import longest_sequence, rl_problems
        from vectorlm.preflight.teacher import check_teacher

        problems += rl_problems(config, rl)
        raise_problems(problems)
        max_tokens = longest_sequence(config) - 1
        check_teacher(config)
    raise_problems(problems)
    if rl is None:
        config = replace(config, notes=(*config.notes, *_data_notes(config)))
        if sampler is not None:
            limit = own_length(description_of(Path(config.model)) or {})
            max_tokens = (sampler.engine.engine_args.get("max_model_len") or limit or math.inf) - 1
    if has_chat_template(config.model) and any(isinstance(each.prompt, str) for each in evaluation_prompts):
        note = (
            "train_parameters.sampler.prompts: texts are answered as they are, without the model's chat template. "
            "Write them as messages, in a JSONL file, to ask as in a chat"
        )
        config = replace(config, notes=(*config.notes, note))
    # Costs more than a minute: the prompt may be one of the last, and models are loaded first. The tokenizer is loaded
    # (which imports torch) where it matters: no text has more tokens than bytes, but for those put around it.
    is_long = any(
        is_messages(each.prompt) or len(str(each.prompt).encode()) + 2 > max_tokens
        for each in evaluation_prompts
    )
    if rl is not None or is_long:
        from vectorlm.train.load import load_tokenizer

        tokenizer = load_tokenizer(config.model)
        check_lengths(prompts, tokenizer, max_tokens, "rl.prompts")
        check_lengths(evaluation_prompts, tokenizer, max_tokens, "train_parameters.sampler.prompts")
    # Costs more than a minute: checkpoints are looked for after models are loaded.
    return CheckedConfig(config, prompts, evaluation_prompts, find_resumption(config, world_size))


def _data_notes(config: Config) -> Iterator[str]:
    """Say what the run will see of its datasets, in the words of preprocessing."""
    data, max_seq_len = config.text, config.train_parameters.max_seq_len
    for name in dict.fromkeys((data.train_ds, data.eval_ds)) if is_installed("datasets") else ():
        if not Path(name, "state.json").is_file():
            continue  # The library that would say so takes a second to import.
        try:
            dataset = load_saved(Path(name), repr(name))
        except DatasetError:
            continue  # Training says what is wrong with it, before it loads a model.
        summary = Summary.of(dataset, max_seq_len, data.ignore_index)
        yield f"{name}: {summary.head()}"
        yield from (f"{name}: {note}" for note in summary.notes())


def _read(
    config: Config, path: str, source: str | Sequence[str], problems: list[str]
) -> Sequence[PromptRecord]:
    try:
        return read_prompts(source, path)
    except DatasetError as error:
        place = config.origins.get(path)
        problems.append(f"{error} ({place})" if place else str(error))
        return []
