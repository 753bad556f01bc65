"""The look at a config before a run starts, by the command or by rank 0; what passes it travels to the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from vectorlm.data.encoding import end_tokens, has_chat_template, is_messages, render_chat
from vectorlm.data.prompts import check_lengths, read_prompts
from vectorlm.data.source import load_saved
from vectorlm.data.summary import Summary, steps_per_epoch
from vectorlm.data.tasks import Tasks
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.ranks.topology import without_gc
from vectorlm.rl.rewards.registry import RESERVED
from vectorlm.runs.config.schema import Config
from vectorlm.runs.config.setting import refuse
from vectorlm.runs.config.value import raise_problems
from vectorlm.runs.preflight.environments import call_notes, environment_problems, source_tools, tool_notes
from vectorlm.runs.preflight.files import callback_problems, file_problems, package_problems
from vectorlm.runs.preflight.local_model import description_of, own_length, resolve_model, vocab_size
from vectorlm.runs.preflight.resume import Resumption, find_resumption
from vectorlm.runs.preflight.rewards import reward_notes, reward_problems
from vectorlm.runs.preflight.sampling import stop_problems
from vectorlm.runs.preflight.settings import setting_problems
from vectorlm.settings import PromptSettings
from vectorlm.types import PromptRecord

ANSWER = "answer"
NEUTRAL = {"temperature": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,)}
"""The values of sampling parameters that change nothing."""


@dataclass(frozen=True)
class CheckedConfig:
    """A config that can be carried out, and what was read to find that out; made by `preflight`."""

    config: Config
    """With the folder of its model, and the model's own length for a `max_seq_len` of -1."""
    prompts: Mapping[str, Sequence[PromptRecord]] = field(default_factory=dict)
    """Of ``rl.prompts``, without a name, or each of ``rl.sources``; each leaves room for an answer."""
    evaluation_prompts: Sequence[PromptRecord] = ()
    """Of ``train_parameters.sampler.prompts``, and the held-out ones of ``rl.sources``."""
    resumption: Resumption | None = None
    """How the run goes on from the checkpoints in its output folder."""


@without_gc()
def preflight(config: Config, world_size: int, num_nodes: int = 1) -> CheckedConfig:
    """Check whether a config can be carried out here; reads each file once, and touches no device.

    The run has `world_size` ranks on `num_nodes` machines together.

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
        *callback_problems(config),
        *file_problems(config),
    ]
    rl, sampler, max_tokens = config.rl, config.train_parameters.sampler, math.inf
    # These cost more than a minute: they are needed after models are loaded.
    sources = {} if rl is None else rl.by_source
    prompts = {name: _read(config, name, each.prompts, problems) for name, each in sources.items()}
    questions = {"": None if sampler is None else sampler.evaluation.prompts}
    questions |= {name: each.held_out for name, each in sources.items() if name}
    held_out = {
        name: _read(config, name, each, problems, is_held_out=True)
        for name, each in questions.items()
        if each is not None
    }
    problems += _overlaps(config, prompts, held_out)
    evaluation_prompts = [
        replace(record, source=name) if name else record for name, each in held_out.items() for record in each
    ]
    shown = {name: _shown(each) for name, each in prompts.items()}
    try:
        problems += reward_problems(config, shown, held_out)
    except ConfigError as error:
        problems.append(str(error))
    if rl is not None:
        # These import torch, which the check of a config for fine-tuning does without.
        from vectorlm.runs.preflight.rl import rl_problems
        from vectorlm.runs.preflight.teacher import check_teacher

        problems += [*rl_problems(config, rl), *environment_problems(rl, shown, held_out)]
        raise_problems(problems)
        max_tokens = config.train_parameters.longest_rollout - 1
        check_teacher(config)
    raise_problems(problems)
    notes = list(config.notes)
    if rl is None:
        notes += _data_notes(config, world_size)
        if sampler is not None:
            limit = own_length(description_of(Path(config.model)) or {})
            max_tokens = (sampler.engine.engine_args.get("max_model_len") or limit or math.inf) - 1
    notes += _prompt_notes(config, prompts, held_out)
    notes += reward_notes(config, shown, held_out)
    notes += _generation_notes(config, max_tokens, bool(evaluation_prompts))
    notes += _rendered_notes(config, shown, held_out, max_tokens)
    config = replace(config, notes=tuple(notes))
    # Costs more than a minute: checkpoints are looked for after models are loaded.
    return CheckedConfig(config, prompts, evaluation_prompts, find_resumption(config, world_size))


def _rendered_notes(
    config: Config,
    shown: Mapping[str, Sequence[PromptRecord]],
    held_out: Mapping[str, Sequence[PromptRecord]],
    max_tokens: float,
) -> list[str]:
    """Check prompts and stop strings with the model's tokenizer; return what is to be said of its chat template.

    The tokenizer is loaded, which imports torch, if it matters: no text has more tokens than bytes, but for those put
    around it.
    """
    rl = config.rl
    notes: list[str] = []
    # Costs more than a minute: the prompt may be one of the last, and models are loaded first.
    is_long = any(
        not isinstance(each.prompt, str) or len(each.prompt.encode()) + 2 > max_tokens
        for some in held_out.values()
        for each in some
    )
    if rl is None and not is_long and not any(each.get("stop") for each in config.sampling_params.values()):
        return []
    from vectorlm.train.load import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    # Silent: answers would go on to their longest.
    raise_problems(list(stop_problems(config.sampling_params, config.origins, tokenizer)))
    size = vocab_size(Path(config.model))
    for is_held_out, found in ((False, shown), (True, held_out)):
        for name, each in found.items():
            place, (tools, may_tell) = _place(name, is_held_out), source_tools(rl, name)
            check_lengths(each, tokenizer, max_tokens, place, size, tools)
            notes += tool_notes(each[0], tokenizer, tools, may_tell=may_tell, setting=place)
            if rl is not None and not is_held_out:
                environment = rl.collect.environment_of(name)
                notes += call_notes(environment, each[0], tokenizer, tools, setting=place)
            if any(is_messages(record.prompt) for record in each):
                notes += [note for note in _end_notes(tokenizer) if note not in notes]
    return notes


def _generation_notes(config: Config, max_tokens: float, is_evaluated: bool) -> Iterator[str]:
    """Say where answers are sampled in another way than the settings, or the model's publisher, may lead to expect."""
    advice = description_of(Path(config.model), "generation_config.json") or {}
    for path, parameters in config.sampling_params.items():
        if isinstance(asked := parameters.get("max_tokens"), int) and asked > max_tokens:
            yield f"{path}.max_tokens={asked}: the context ends answers after {max_tokens} at most"
        left = {
            name: advice[name]
            for name, neutral in NEUTRAL.items()
            if name not in parameters and advice.get(name) not in (None, *neutral)
        }
        # Silent: other tools take these over, and their answers would be others.
        if left and parameters.get("temperature") != 0:
            listed = ", ".join(f"{name} {value}" for name, value in left.items())
            yield f"{path}: {listed} of the model's generation_config.json are not used; write them here to use them"
    sampler = config.train_parameters.sampler
    # Silent: half an answer is a wrong one.
    if is_evaluated and sampler is not None and "max_tokens" not in sampler.engine.sampling_params:
        yield (
            "train_parameters.sampler.sampling_params: answers to held-out prompts end after 16 tokens, vLLM's "
            "default. Write max_tokens for another length"
        )


def _end_notes(tokenizer: Any) -> Iterator[str]:
    """Say that the chat template ends an answer with nothing that an engine stops at."""
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = str(render_chat(tokenizer, messages, tokenize=False))
    except Exception:  # A template may raise whatever its author chose, and may want other messages.
        return
    end = text.rpartition(ANSWER)[2]
    if not end_tokens(tokenizer) & set(tokenizer.encode(end, add_special_tokens=False)):
        # Silent: answers would go on to their longest.
        yield (
            "the chat template does not end assistant turns with an end token (eos_token of the tokenizer, or "
            "eos_token_id in generation_config.json), so the model cannot learn to stop. Correct the template or the "
            "token"
        )


def _prompt_notes(
    config: Config,
    prompts: Mapping[str, Sequence[PromptRecord]],
    held_out: Mapping[str, Sequence[PromptRecord]],
) -> Iterator[str]:
    """Say where prompts are taken in another way than they may look."""
    places = {_place(name, is_held_out=True): each for name, each in held_out.items()}
    places |= {_place(name): _shown(each) for name, each in prompts.items()}
    for place, each in places.items() if has_chat_template(config.model) else ():
        if any(isinstance(record.prompt, str) for record in each):
            yield (
                f"{place}: texts are answered as they are, without the model's chat template. "
                "Write them as messages, in a JSONL file, to ask as in a chat"
            )
    for name, each in prompts.items():
        hidden = {column for record in _shown(each) for column in record.columns if column in RESERVED}
        if hidden:
            names = ", ".join(sorted(hidden))
            yield f"{_place(name)}: rewards do not get the column {names}, which names what is sampled. Rename it"


def _data_notes(config: Config, world_size: int) -> Iterator[str]:
    """Say what the run will see of its datasets, in the words of preprocessing."""
    data, train = config.text, config.train_parameters
    for name in dict.fromkeys((data.train_ds, *data.held_out.values())):
        if not Path(name, "state.json").is_file():
            continue  # The library that would say so takes a second to import.
        try:
            dataset = load_saved(Path(name), repr(name))
        except DatasetError:
            continue  # Training says what is wrong with it, before it loads a model.
        summary = Summary.of(dataset, train.max_seq_len, data.ignore_index)
        yield f"{name}: {summary.head()}"
        if name == data.train_ds:
            per_epoch = steps_per_epoch(len(dataset), config.rows_per_step(world_size))
            yield f"{name}: {train.loop.epochs * per_epoch:,} optimizer steps, {per_epoch:,} an epoch"
        yield from (f"{name}: {note}" for note in summary.notes())


def _read(
    config: Config,
    name: str,
    source: str | Sequence[str] | PromptSettings,
    problems: list[str],
    *,
    is_held_out: bool = False,
) -> Sequence[PromptRecord]:
    path = _place(name, is_held_out)
    try:
        return read_prompts(source, path, is_held_out=is_held_out)
    except DatasetError as error:
        place = config.origins.get(path)
        problems.append(f"{error} ({place})" if place else str(error))
        return []


def _overlaps(
    config: Config,
    prompts: Mapping[str, Sequence[PromptRecord]],
    held_out: Mapping[str, Sequence[PromptRecord]],
) -> Iterator[str]:
    # Silent: questions that were trained on would be held out.
    for (name, each), (of, asked) in product(prompts.items(), held_out.items()):
        if isinstance(each, Tasks) and isinstance(asked, Tasks) and each.shares_items_with(asked):
            rule = f"repeats items of {_place(name)}, which have seeds from {each.seeds.start} to {each.seeds.stop - 1}"
            place = f"{_place(of, is_held_out=True)}.seed"
            yield refuse(config, place, rule, "Use a seed outside.", asked.seed)


def _place(source: str, is_held_out: bool = False) -> str:
    """Return the setting that prompts come from."""
    if source:
        return f"rl.sources.{source}.{'held_out' if is_held_out else 'prompts'}"
    return "train_parameters.sampler.prompts" if is_held_out else "rl.prompts"


def _shown(prompts: Sequence[PromptRecord]) -> Sequence[PromptRecord]:
    """Return the prompts that stand for all: there is no end of tasks."""
    return prompts.sample() if isinstance(prompts, Tasks) else prompts
