"""Check that rewards, environments and agents accept the columns of the prompts; imports them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from vectorlm.data.encoding import (
    SPOKEN,
    asked,
    encode_reply,
    end_tokens,
    is_messages,
    render_chat,
    split_unfinished,
)
from vectorlm.data.settings import in_full
from vectorlm.data.tasks import TASK_COLUMNS
from vectorlm.errors import ConfigError
from vectorlm.plugin import load_plugin
from vectorlm.rl.environments.environment import ACCESS, AGENT, kind_of, tools_of
from vectorlm.rl.environments.tools import (
    CALL_ID_LENGTH,
    ToolCall,
    message_of,
    parse_calls,
    schemas_of,
    tool_message,
)
from vectorlm.rl.rewards.registry import (
    EXTRAS,
    JUDGE,
    LOG,
    OF_TRL,
    RESERVED,
    SELF,
    RewardSignature,
    get_reward,
    given_of,
    without_arguments,
)
from vectorlm.rl.settings import VERIFIERS
from vectorlm.runs.config.schema import Config, RLSettings
from vectorlm.runs.config.setting import refuse
from vectorlm.settings import nearest
from vectorlm.types import PromptRecord

CALLED: dict[str, dict[str, tuple[str, ...]]] = {
    "step": {"reset": ("row",), "step": ("message",), "close": ()},
    "respond": {"respond": ("text",), "close": ()},
    "trl": {"close": (), "get_reward": ()},
}
"""Methods and their arguments by form of environment, without TRL's `reset`, which gets the columns by name."""


class SourcePrompts(NamedTuple):
    """The prompts that a source trains on, or its held-out prompts."""

    source: str
    """Name of the source; empty for ``rl.prompts`` and ``evaluation.prompts``."""
    is_held_out: bool
    records: Sequence[PromptRecord]
    """All prompts, as they were read."""
    shown: Sequence[PromptRecord]
    """The prompts to check: all of them, or a sample of endless tasks."""

    @property
    def setting(self) -> str:
        """The setting that names the prompts."""
        return setting_of(self.source, self.is_held_out)


def setting_of(source: str, is_held_out: bool) -> str:
    """Return the setting of a source's prompts or held-out prompts."""
    if source:
        return f"rl.sources.{source}.{'held_out' if is_held_out else 'prompts'}"
    return "evaluation.prompts" if is_held_out else "rl.prompts"


def environment_problems(
    rl: RLSettings, prompts: Sequence[SourcePrompts], asks_adapters: bool = False
) -> Iterator[str]:
    """Yield the problems of environments and agents."""
    # Costs more than a minute: it is first called after models are loaded.
    columns: dict[str, set[str] | None] = {}
    for source in prompts:
        if (environment := rl.collect.environment_of(source.source)) is None:
            continue
        common = columns.setdefault(environment, None)
        # An agent gets whole rows.
        for record in () if environment.startswith(AGENT) else source.shown:
            own = {*record.columns, *(ACCESS if asks_adapters else ())}
            common = own if common is None else common & own
        columns[environment] = common
    for environment, common in columns.items():
        try:
            require_environment(load_plugin(environment.removeprefix(AGENT)), environment, common)
        except ConfigError as error:
            yield str(error)


def taskset_problems(config: Config, prompts: Sequence[SourcePrompts]) -> Iterator[str]:
    """Yield prompts that the agent of verifiers cannot play, and held-out tasks of verifiers that nothing plays."""
    rl = config.rl
    for source in prompts:
        environment, path = None if rl is None else rl.collect.environment_of(source.source), source.setting
        # Costs more than a minute: the agent fails after models are loaded.
        if environment == VERIFIERS and not all(TASK_COLUMNS.issubset(row.columns) for row in source.shown):
            fix = "Use `verifiers:TASKSET`, or another environment."
            if source.is_held_out:
                fix = "Use `verifiers:TASKSET`. For single turns, write the prompts to learn from in rl.sources, and "
                fix += "these in evaluation.prompts."
            yield refuse(config, path, "must be tasks of verifiers, whose agent plays these prompts", fix)
        if environment is not None or not source.is_held_out:
            continue
        sources = {} if rl is None else rl.collect.sources
        given = sources[source.source].held_out if source.source else config.evaluation.prompts
        # Silent: the answers would be single turns, without the reward of verifiers.
        if getattr(in_full(given), "verifiers", None) is not None:
            rule = "needs a source that trains on tasks of verifiers, because only such a source plays them"
            fix = "Write it as held_out of such a source in rl.sources, or use other prompts."
            yield refuse(config, path if isinstance(given, str) else f"{path}.verifiers", rule, fix)


def require_environment(make: Any, where: str, columns: Collection[str] | None = None) -> None:
    """Raise `ConfigError` unless `make` can be an environment or an agent; objects made by a function are not checked.

    A class needs methods with the right arguments, and tools with schemas. `columns` are the columns that all prompts
    have; they must fill the parameters of the class or function.
    """
    if not callable(make):
        raise ConfigError(
            f"the environment {where!r} must be a class or a function, and is a {type(make).__name__}."
        )
    if where.startswith(AGENT):
        _require_call(make, ("url", "key", "row"), where)
        return
    for name, parameter in inspect.signature(make).parameters.items():
        is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        is_needed = parameter.default is parameter.empty and not is_open
        if columns is not None and is_needed and name not in columns:
            fix = nearest(name, columns) or "Give it a default, or add the column."
            if name == "prompt":
                fix = "Let reset(row) read it."
            has = f"the columns of all its prompts are {', '.join(sorted(columns)) or 'none'}"
            raise ConfigError(f"the environment {where!r} needs the parameter {name!r}, and {has}. {fix}")
    if not isinstance(make, type):
        return
    kind = kind_of(make, where)
    for name, arguments in CALLED[kind].items():
        method = inspect.getattr_static(make, name, None)
        if inspect.isfunction(method):
            _require_call(method, ("self", *arguments), f"{where}.{name}")
    _class_tools(make, where)


def source_tools(rl: RLSettings | None, source: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the tool schemas of a source's environment, and whether its `reset` may describe them in the prompt."""
    environment = None if rl is None else rl.collect.environment_of(source)
    if environment is None or environment.startswith(AGENT):
        return [], False
    make = load_plugin(environment)
    # In TRL's form `reset` returns only an observation.
    may_tell = callable(getattr(make, "step", None)) and hasattr(make, "reset")
    return _class_tools(make, environment), may_tell


def _class_tools(make: Any, where: str) -> list[dict[str, Any]]:
    # Only classes are checked.
    if not isinstance(make, type):
        return []
    kind = kind_of(make, where)
    has_tools = kind == "trl" or isinstance(getattr(make, "tools", None), Iterable)
    return schemas_of(tools_of(make, kind), where) if has_tools else []


def tool_notes(rl: RLSettings | None, source: SourcePrompts, tokenizer: Any) -> Iterator[str]:
    """Yield a note if the chat template leaves out the tools of a prompt.

    Raises:
        ConfigError: The tools are the environment's, and neither it nor the prompt describes them.
    """
    own_tools, may_tell = source_tools(rl, source.source)
    prompt: Any = source.shown[0].prompt
    text = ""
    if is_messages(prompt):
        if (told := asked(replace(source.shown[0], token_ids=None), own_tools)) == prompt:
            return
        try:
            text = render_chat(tokenizer, prompt, tokenize=False)
        except Exception:  # The template needs tools.
            return
        if render_chat(tokenizer, prompt, tools=told["tools"], tokenize=False) != text:
            return
    elif not own_tools:
        return
    # Silent: the policy would call tools only by chance.
    names = [tool["function"]["name"] for tool in own_tools]
    if not may_tell and not all(name in text for name in names):
        raise ConfigError(
            f"{source.setting} must describe the environment's tools, {', '.join(names)}. Use messages and a chat "
            "template that renders `tools`, or describe the tools in the messages."
        )
    fix = "Begin the prompts with an example call and result, or set `chat_template`"
    yield f"{source.setting}: the chat template does not render the tools. {fix}"


def call_notes(rl: RLSettings, source: SourcePrompts, tokenizer: Any) -> Iterator[str]:
    """Yield notes if the chat template cannot render tool calls and results, or renders them unreadably.

    Raises:
        ConfigError: The template refuses them, and the environment has tools.
    """
    environment, (own_tools, _) = rl.collect.environment_of(source.source), source_tools(rl, source.source)
    is_agent, setting = environment is not None and environment.startswith(AGENT), source.setting
    if environment is None or not (is_agent or own_tools or _names_tools(load_plugin(environment))):
        return
    if is_agent and not tokenizer.chat_template:
        yield (
            f"{setting}: the model has no chat template, so chat requests of the agent will be refused. Let it ask for "
            "/v1/completions, or add a chat_template.jinja to the model"
        )
        return
    tools = [*own_tools] or [
        {"type": "function", "function": {"name": "act", "parameters": {"type": "object"}}}
    ]
    call = ToolCall(tools[0]["function"]["name"], {"x": 1}, id="1" * CALL_ID_LENGTH)
    called, told = message_of("", [call]), tool_message(call, "done")
    prompt: Any = source.shown[0].prompt
    chat = split_unfinished(prompt)[0] if is_messages(prompt) else [{"role": "user", "content": "question"}]
    try:
        encode_reply([*chat, called, told], [told], (), tokenizer, tools)
        with_text, with_call = (
            render_chat(tokenizer, [*chat, last], tools=tools, tokenize=False)
            for last in ({"role": "assistant", "content": SPOKEN}, called)
        )
    except Exception as error:  # A template may raise any exception.
        why = f"{setting}: the chat template refuses calls of tools and their results ({type(error).__name__}: {error})"
        if not is_agent:
            raise ConfigError(f"{why}. Use another template, or an environment without tools.") from error
        yield f"{why}. Requests of the agent that hold some will fail"
        return
    num_same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(with_text, with_call, strict=False))
    )
    ids, ends = tokenizer.encode(with_call[num_same:], add_special_tokens=False), end_tokens(tokenizer)
    # Engines return the text without end tokens and special tokens.
    text = tokenizer.decode([*takewhile(lambda token: token not in ends, ids)], skip_special_tokens=True)
    if call.name in text and parse_calls(text, [call.name])[1] != [replace(call, id="")]:
        yield (
            f"{setting}: the chat template writes calls of tools as {with_call[num_same:][:200]!r}, which the run "
            "cannot parse: such calls of the policy count as text. Describe a supported format, or use another template"
        )


def _names_tools(make: Any) -> bool:
    """Return whether the code of a class mentions tools, which its objects may then have."""
    return any(
        "tools" in method.__code__.co_names for _, method in inspect.getmembers(make, inspect.isfunction)
    )


def _require_call(function: Any, arguments: Sequence[str], where: str) -> None:
    try:
        inspect.signature(function, follow_wrapped=False).bind(*arguments)
    except ValueError:
        return  # The function has no signature.
    except TypeError as error:
        how = ", ".join(arguments)
        raise ConfigError(
            f"{where!r} cannot be called with ({how}): {error}. Give it these parameters."
        ) from error


def reward_problems(config: Config, prompts: Sequence[SourcePrompts]) -> Iterator[str]:
    """Yield the parameters of reward functions that nothing supplies, and judges that cannot be asked.

    Raises:
        ConfigError: A function or its file does not exist.
    """
    # Costs more than a minute: the first call comes after models are loaded and completions sampled.
    seen = set[str]()
    for path, value, name, source in _uses(config, prompts):
        for rule, fix in signature_problems(get_reward(name), source.shown, source.setting):
            yield refuse(config, path, rule, fix, value)
        for rule, fix in judge_problems(name, has_engine=config.rl is not None) if name not in seen else ():
            yield refuse(config, path, rule, fix, value)
        seen.add(name)


def reward_notes(config: Config, prompts: Sequence[SourcePrompts]) -> Iterator[str]:
    """Yield notes on parameters of rewards that both a column and the run could fill."""
    for _, _, name, source in _uses(config, prompts):
        kinds = RewardSignature.of(get_reward(name)).kinds
        columns = {column for record in source.shown for column in record.columns}
        # Silent: a dataset's own conversation would be scored instead of the conversation with the completion.
        for column in sorted(columns & {*EXTRAS} & {*kinds}):
            gets = (
                "the run's function, not the column" if column == LOG else "the column, not the run's value"
            )
            yield (
                f"{source.setting}: the reward {name} gets as {column!r} {gets}. Rename the column if it should get "
                "the other"
            )


def _uses(config: Config, prompts: Sequence[SourcePrompts]) -> Iterator[tuple[str, Any, str, SourcePrompts]]:
    """Yield setting, value and name of every reward, and its prompts."""
    rl = config.rl
    for source in prompts:
        if rl is not None and not source.is_held_out:
            has_own = source.source and rl.collect.sources[source.source].rewards
            path = f"rl.sources.{source.source}.rewards" if has_own else "rl.rewards"
            for name, weight in rl.by_source[source.source].rewards.items() if source.shown else ():
                yield f"{path}.{name}", weight, name, source
        elif source.shown:
            path = source.setting if source.source else "evaluation.rewards"
            names = [*config.evaluation_rewards]
            if source.source:
                names = (
                    [config.held_out_rewards[source.source]]
                    if source.source in config.held_out_rewards
                    else []
                )
            yield from ((path, name, name, source) for name in names)


def judge_problems(name: str, *, has_engine: bool) -> Iterator[tuple[str, str]]:
    """Yield rule and fix for arguments of the reward `judge` with which nobody can be asked, or no score is found.

    `has_engine` is whether an RL run, whose engine may be the judge, scores the completions.
    """
    given = given_of(name) if without_arguments(name) == JUDGE else {}
    is_own = given.get("model") == SELF
    if given and is_own == ("url" in given):
        yield "needs either the url of a server or model='self'", "Add the url."
    elif is_own and not has_engine:
        fix = "Name a model and the url of its server."
        yield "needs a run of reinforcement learning, whose engine it asks", fix
    elif not _finds_score(given.get("pattern")):
        rule = "must have a regular expression with at most one group, which is the score, as pattern"
        yield rule, "Write other groups as (?:…)."
    elif given.get("adapter") and not is_own:
        # Silent: the adapter would be ignored.
        yield "takes an adapter only with model='self'", "Use model='self'."


def _finds_score(pattern: str | None) -> bool:
    """Return whether a judge's pattern can be compiled and has at most one group."""
    try:
        return re.compile(pattern or "").groups < 2
    except re.error:
        return False


def signature_problems(
    reward: Callable[..., Any], records: Sequence[PromptRecord], source: str
) -> Iterator[tuple[str, str]]:
    """Yield rule and fix for the parameters of a reward that the prompts of `source` cannot fill."""
    signature = RewardSignature.of(reward)
    columns = {name for record in records for name in record.columns if name not in RESERVED}
    # Silent: the reward would not depend on the completion.
    if not signature.sees_completion:
        yield "needs a parameter for the completion", "Add a parameter `completion`, or `messages`."
    for name in signature.missing(columns):
        rule = f"needs {name!r}, which the prompts do not have"
        if name in OF_TRL:
            yield f"{rule}: it belongs to TRL's trainer", f"Give it a default: `{name}=None`."
        else:
            has = ", ".join(sorted(columns)) or "none but `prompt`"
            fix = nearest(name, columns) or "Give it a default, or add the column."
            yield f"{rule}: the columns of {source} are {has}", fix
    if signature.takes_lists:
        return  # A list has None where a row lacks the column.
    for name in signature.required:
        lacking = next((place for place, record in enumerate(records) if name not in record.columns), None)
        if name in columns and lacking is not None:
            fix = "Give it a default, or fill the column."
            yield f"needs {name!r}, which prompt {lacking} of {source} does not have", fix
