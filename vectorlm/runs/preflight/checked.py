"""Check a config once before a run starts, in the command or on rank 0; the result is sent to all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from vectorlm.data.encoding import end_tokens, has_chat_template, is_messages, render_chat
from vectorlm.data.images import images_of, looks_like_image
from vectorlm.data.prompts import check_lengths, fit_prompts, read_prompts
from vectorlm.data.source import load_saved
from vectorlm.data.summary import Summary, steps_per_epoch
from vectorlm.data.tasks import Tasks
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.ranks.topology import without_gc
from vectorlm.rl.rewards.registry import RESERVED
from vectorlm.runs.config.schema import Config, RLSettings
from vectorlm.runs.config.setting import refuse
from vectorlm.runs.config.value import raise_problems
from vectorlm.runs.preflight.files import callback_problems, file_problems, package_problems
from vectorlm.runs.preflight.local_model import (
    description_of,
    is_vision_language,
    own_length,
    resolve_model,
    vocab_size,
)
from vectorlm.runs.preflight.resume import Resumption, find_resumption
from vectorlm.runs.preflight.sampling import PARAMETERS, answer_tokens, stop_problems
from vectorlm.runs.preflight.settings import setting_problems, step_problems
from vectorlm.runs.preflight.user_code import (
    SourcePrompts,
    call_notes,
    environment_problems,
    reward_notes,
    reward_problems,
    setting_of,
    source_tools,
    taskset_problems,
    tool_notes,
)
from vectorlm.types import PromptRecord

ANSWER = "answer"
ADVISED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that generation_config.json may recommend."""


@dataclass(frozen=True)
class CheckedConfig:
    """A config that passed `preflight`, with the prompts that were read."""

    config: Config
    """The config with its model's folder, and the model's own length in place of `max_seq_len: -1`."""
    prompts: Mapping[str, Sequence[PromptRecord]] = field(default_factory=dict)
    """Prompts by source; ``rl.prompts`` has the name "". Every prompt leaves room for an answer."""
    evaluation_prompts: Sequence[PromptRecord] = ()
    """The held-out prompts: ``evaluation.prompts``, and ``held_out`` of ``rl.sources``."""
    resumption: Resumption | None = None
    """The checkpoint that the run resumes from; None starts from the beginning."""


@without_gc()
def preflight(config: Config, world_size: int, num_nodes: int = 1) -> CheckedConfig:
    """Check whether a config can run on this machine; reads every file once and touches no device.

    Args:
        config: The config.
        world_size: The number of ranks on all nodes.
        num_nodes: The number of machines.

    Raises:
        ConfigError: Lists every problem found, or a prompt cannot be encoded.
        CheckpointError: The checkpoints in the output folder belong to another run, or cannot be read.
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
    rl, max_tokens = config.rl, math.inf
    # These cost more than a minute: they are needed after models are loaded.
    sources = {} if rl is None else rl.by_source
    asked: list[tuple[str, bool, Any]] = [(name, False, source.prompts) for name, source in sources.items()]
    asked.append(("", True, config.evaluation.prompts))
    asked += [(name, True, source.held_out) for name, source in sources.items() if name]
    prompts = [_read(config, *source, problems) for source in asked if source[2] is not None]
    problems += [*_overlaps(config, prompts), *taskset_problems(config, prompts)]
    try:
        problems += reward_problems(config, prompts)
    except ConfigError as error:
        problems.append(str(error))
    if rl is not None:
        # These import torch, which the check of a config for fine-tuning does not need.
        from vectorlm.runs.preflight.rl import (
            check_teacher,
            image_problems,
            older_judge_problems,
            rl_problems,
            teacher_prompt_problems,
        )

        problems += [*rl_problems(config, rl), *environment_problems(rl, prompts, config.asks_adapters)]
        problems += image_problems(config, rl, prompts)
        problems += teacher_prompt_problems(config, rl, prompts)
        raise_problems(problems)
        max_tokens = config.longest_rollout - 1
        check_teacher(config)
    raise_problems(problems)
    notes = list(config.notes)
    if rl is None:
        notes += _data_notes(config, world_size)
        if config.has_engine:
            limit = own_length(description_of(Path(config.model)) or {})
            max_tokens = (config.engine.engine_args.get("max_model_len") or limit or math.inf) - 1
    notes += _prompt_notes(config, prompts)
    notes += reward_notes(config, prompts)
    prompts, more = _fitted(config, prompts, max_tokens + 1)
    notes += more
    trained = {source.source: source.records for source in prompts if not source.is_held_out}
    if rl is not None:
        config = replace(config, rl=_with_steps(rl, sum(map(len, trained.values()))))
        raise_problems(list(step_problems(config)))
    evaluation_prompts = [
        replace(record, source=source.source) if source.source else record
        for source in prompts
        for record in (source.records if source.is_held_out else ())
    ]
    notes += _generation_notes(config, bool(evaluation_prompts))
    notes += _rendered_notes(config, prompts, max_tokens)
    config = replace(config, notes=tuple(notes))
    # Costs more than a minute: checkpoints are looked for after models are loaded.
    resumption = find_resumption(config, world_size)
    if rl is not None:
        raise_problems(list(older_judge_problems(config, 0 if resumption is None else resumption.step)))
    return CheckedConfig(config, trained, evaluation_prompts, resumption)


def _rendered_notes(config: Config, prompts: Sequence[SourcePrompts], max_tokens: float) -> list[str]:
    """Check prompts and stop strings with the model's tokenizer; return notes on its chat template.

    Loads the tokenizer, which imports torch, only if necessary: a text has at most as many tokens as bytes, plus the
    tokens around it.
    """
    rl = config.rl
    notes: list[str] = []
    # Costs more than a minute: the prompt may be one of the last, and models are loaded first.
    is_long = any(
        not isinstance(record.prompt, str)
        or len(record.prompt.encode()) + 2 > _room(config, True, max_tokens + 1)
        for source in prompts
        for record in (source.records if source.is_held_out else ())
    )
    has_stops = any(parameters.get("stop") for parameters in config.sampling_params.values())
    if rl is None and not is_long and not has_stops:
        return []
    from vectorlm.train.load import load_tokenizer

    tokenizer = load_tokenizer(config.model, config.chat)
    # Silent: answers would always run until `max_tokens`.
    raise_problems(list(stop_problems(config, tokenizer)))
    size = vocab_size(Path(config.model))
    for source in prompts:
        tools, _ = source_tools(rl, source.source)
        room = _room(config, source.is_held_out, max_tokens + 1)
        check_lengths(source.shown, tokenizer, room, source.setting, size, tools)
        notes += tool_notes(rl, source, tokenizer)
        if rl is not None and not source.is_held_out:
            notes += call_notes(rl, source, tokenizer)
        if any(is_messages(record.prompt) for record in source.shown):
            notes += [note for note in _end_notes(tokenizer) if note not in notes]
    return notes


def _with_steps(rl: RLSettings, num_prompts: int) -> RLSettings:
    """Return the settings with `max_steps` filled in, and limited by `num_epochs_over_prompts`."""
    if rl.num_epochs_over_prompts is None:
        return rl
    size = rl.collect.prompts_per_step
    # Groups from a file use no prompts. If all groups are from the file, a step counts as many prompts as groups.
    num_fresh = size if rl.rollout.path is None else size - round(size * rl.rollout.replayed_share)
    steps = math.ceil(rl.num_epochs_over_prompts * num_prompts / (num_fresh or size))
    return replace(rl, max_steps=min(rl.max_steps or steps, max(steps, 1)))


def _room(config: Config, is_held_out: bool, longest: float) -> float:
    """Return the largest number of prompt tokens that leaves room for `max_tokens`; raise `ConfigError` if it is 0."""
    rl = config.rl
    parameters = config.evaluation.sampling_params if is_held_out or rl is None else rl.collect.sampling
    asked = answer_tokens(parameters)
    if asked >= longest:
        path = f"{'evaluation' if is_held_out else 'rl'}.sampling_params.max_tokens"
        rule = f"leaves no room for a prompt within {longest} tokens"
        fix = "Use less, or raise train_parameters.max_seq_len and engine.max_model_len."
        raise ConfigError(refuse(config, path, rule, fix, asked))
    return longest - asked


def _fitted(
    config: Config, prompts: Sequence[SourcePrompts], longest: float
) -> tuple[list[SourcePrompts], list[str]]:
    """Drop or truncate prompts that are too long, as the settings say; return the prompts and notes."""
    rl, found, notes = config.rl, list[SourcePrompts](), list[str]()
    for source in prompts:
        how = "error" if rl is None else rl.collect.overlong_prompts
        how = config.evaluation.overlong_prompts if source.is_held_out else how
        if how != "error":
            from vectorlm.train.load import load_tokenizer

            room, (tools, _) = _room(config, source.is_held_out, longest), source_tools(rl, source.source)
            tokenizer = load_tokenizer(config.model, config.chat)
            records, note = fit_prompts(source.records, tokenizer, room, source.setting, how, tools)
            notes += [note] if note else []
            # Only a sample of endless tasks is checked.
            shown = records if source.shown is source.records else records[: len(source.shown)]
            source = source._replace(records=records, shown=shown)
        found.append(source)
    return found, notes


def _generation_notes(config: Config, is_evaluated: bool) -> Iterator[str]:
    """Yield notes if sampling ignores the model's generation_config.json, or answers have vLLM's default length."""
    advice = description_of(Path(config.model), "generation_config.json") or {}
    for path, parameters in config.sampling_params.items():
        left = {
            name: advice[name]
            for name in ADVISED
            if name not in parameters and advice.get(name) not in (None, *PARAMETERS[name].neutral)
        }
        # Silent: other tools use these values, and their answers would be different.
        if left and parameters.get("temperature") != 0:
            listed = ", ".join(f"{name} {value}" for name, value in left.items())
            yield f"{path}: {listed} of the model's generation_config.json are not used; write them here to use them"
    # Silent: a truncated answer counts as wrong.
    if is_evaluated and "max_tokens" not in config.evaluation.sampling_params:
        temperature = "" if "temperature" in config.evaluation.sampling_params else "temperature 1 and "
        seed = "; a prompt keeps its seed, and small updates may not change its answer" if temperature else ""
        yield (
            f"evaluation.sampling_params: answers to held-out prompts use vLLM's defaults, {temperature}max_tokens 16. "
            f"Write other values here, such as temperature 0 for greedy answers{seed}"
        )


def _end_notes(tokenizer: Any) -> Iterator[str]:
    """Yield a note if the chat template ends an answer without an end token."""
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = str(render_chat(tokenizer, messages, tokenize=False))
    except Exception:  # A template may raise any exception, and may need other messages.
        return
    end = text.rpartition(ANSWER)[2]
    if not end_tokens(tokenizer) & set(tokenizer.encode(end, add_special_tokens=False)):
        # Silent: answers would always run until `max_tokens`.
        yield (
            "the chat template does not end assistant turns with an end token (eos_token of the tokenizer, or "
            "eos_token_id in generation_config.json), so the model cannot learn to stop. Correct the template or the "
            "token"
        )


def _prompt_notes(config: Config, prompts: Sequence[SourcePrompts]) -> Iterator[str]:
    """Yield notes on prompts without the chat template, and on columns that rewards or the model do not get."""
    has_template = config.chat.chat_template is not None or has_chat_template(config.model)
    for source in prompts if has_template else ():
        if any(isinstance(record.prompt, str) for record in source.shown):
            yield (
                f"{source.setting}: the model continues these texts without its chat template. Write them as "
                "messages in a JSONL file to use it"
            )
    for source in prompts:
        hidden = {column for record in source.shown for column in record.columns if column in RESERVED}
        if hidden and not source.is_held_out:
            names = ", ".join(sorted(hidden))
            yield f"{source.setting}: rewards do not get the column {names}: the name is reserved. Rename the column"
    # Silent: the model would answer without the picture.
    for source in prompts if is_vision_language(config.model) else ():
        if any(images_of(record.prompt) for record in source.shown):
            continue
        for column in sorted({name for record in source.shown[:1] for name in record.columns}):
            if looks_like_image(source.shown[0].columns[column]):
                yield (
                    f"{source.setting}: no prompt has an image, and the column {column!r} holds images. Rename it to "
                    "'image' to let the model see them"
                )


def _data_notes(config: Config, world_size: int) -> Iterator[str]:
    """Yield notes on the sizes of the datasets."""
    data, train = config.text, config.train_parameters
    for name in dict.fromkeys((data.train_ds, *data.held_out.values())):
        if not Path(name, "state.json").is_file():
            continue  # `datasets` takes a second to import.
        try:
            dataset = load_saved(Path(name), repr(name))
        except DatasetError:
            continue  # Training reports the problem before it loads a model.
        summary = Summary.of(dataset, train.max_seq_len, data.ignore_index)
        yield f"{name}: {summary.head()}"
        if name == data.train_ds:
            per_epoch = steps_per_epoch(len(dataset), config.rows_per_step(world_size))
            yield f"{name}: {train.loop.epochs * per_epoch:,} optimizer steps, {per_epoch:,} per epoch"
        yield from (f"{name}: {note}" for note in summary.notes())


def _read(config: Config, name: str, is_held_out: bool, source: Any, problems: list[str]) -> SourcePrompts:
    path = setting_of(name, is_held_out)
    records: Sequence[PromptRecord] = []
    try:
        records = read_prompts(source, path, is_held_out=is_held_out)
    except DatasetError as error:
        place = config.origins.get(path)
        problems.append(f"{error} ({place})" if place else str(error))
    shown = records.sample() if isinstance(records, Tasks) and not is_held_out else records
    return SourcePrompts(name, is_held_out, records, shown)


def _overlaps(config: Config, prompts: Sequence[SourcePrompts]) -> Iterator[str]:
    # Silent: the run would train on held-out questions.
    for source, held_out in product(prompts, prompts):
        tasks, asked = source.records, held_out.records
        if source.is_held_out or not held_out.is_held_out:
            continue
        if isinstance(tasks, Tasks) and isinstance(asked, Tasks) and tasks.shares_items_with(asked):
            first, last = tasks.seeds.start, tasks.seeds.stop - 1
            rule = f"must be outside the seeds of {source.setting}, {first} to {last}"
            yield refuse(config, f"{held_out.setting}.seed", rule, "Use another seed.", asked.seed)
