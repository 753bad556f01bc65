"""The look at a config before a run starts, by the command or by rank 0; what passes it travels to the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vectorlm.config.schema import Config
from vectorlm.config.value import raise_problems
from vectorlm.data.prompts import check_lengths, read_prompts
from vectorlm.encoding import is_messages
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.preflight.files import file_problems
from vectorlm.preflight.local_model import resolve_model
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
    # Costs more than a minute: the prompt may be one of the last, and models are loaded first.
    if rl is not None or any(is_messages(record.prompt) for record in evaluation_prompts):
        from vectorlm.train.load import load_tokenizer

        tokenizer = load_tokenizer(config.model)
        check_lengths(prompts, tokenizer, max_tokens, "rl.prompts")
        check_lengths(evaluation_prompts, tokenizer, max_tokens, "train_parameters.sampler.prompts")
    # Costs more than a minute: checkpoints are looked for after models are loaded.
    return CheckedConfig(config, prompts, evaluation_prompts, find_resumption(config, world_size))


def _read(
    config: Config, path: str, source: str | Sequence[str], problems: list[str]
) -> Sequence[PromptRecord]:
    try:
        return read_prompts(source, path)
    except DatasetError as error:
        place = config.origins.get(path)
        problems.append(f"{error} ({place})" if place else str(error))
        return []
