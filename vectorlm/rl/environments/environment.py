"""Environments: the tools, games or simulated users that reply to a rollout's turns."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vectorlm.data.encoding import escaped_halves, is_messages
from vectorlm.data.images import with_content
from vectorlm.errors import ConfigError
from vectorlm.rl.environments.tools import CALL_ID_LENGTH, call_tool, message_of, parse_calls
from vectorlm.types import MAX_REWARD

AGENT = "openai:"
"""Prefix of ``rl.environment`` if it names an agent, which sends requests over HTTP."""
ACCESS = ("client_url", "key")
"""Parameters that give an environment access to the engine's adapters over HTTP."""
Message = Mapping[str, Any]
"""A chat message: ``{"role", "content"}``, and ``tool_calls`` if the policy called tools."""


@dataclass(frozen=True)
class Reply:
    """An environment's answer to a turn."""

    messages: str | Sequence[Message] = ()
    """Messages to append with the chat template; a text continues the policy's own message."""
    reward: float | None = None
    """A reward for this turn; None for no reward."""
    done: bool = False
    """Whether the rollout has ended."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log; an evaluation counts an answer as correct if the metric `acc` is 1."""


class Environment(Protocol):
    """The interface of an environment; every rollout gets its own instance. Every method may be a coroutine function.

    An environment may have `tools`: functions with type hints and docstrings. The chat template lists them, and calls
    of the policy run them without `step`. `step` receives only messages without a call.

    Example:
        >>> class Guess:
        ...     def reset(self, row):
        ...         self.wanted = row["number"]
        ...     def step(self, message):
        ...         guess = int(message["content"])
        ...         if guess == self.wanted:
        ...             return Reply(reward=1.0, done=True)
        ...         hint = "higher" if guess < self.wanted else "lower"
        ...         return [{"role": "user", "content": hint}]
        ...     def close(self):
        ...         pass
    """

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Start with a prompt's columns; return messages to append to the prompt, or None."""

    def step(self, message: Message) -> Any:
        """Return a `Reply`, or only its messages; None ends the rollout."""

    def close(self) -> Any:
        """Release resources."""


def to_reply(value: Any) -> Reply:
    """Convert an environment's answer to a `Reply`.

    Raises:
        TypeError: The answer is neither text nor messages, or a field has the wrong type.
    """
    if value is None:
        return Reply(done=True)
    reply = value if isinstance(value, Reply) else Reply(value)
    messages = [reply.messages] if isinstance(reply.messages, Mapping) else reply.messages
    if not isinstance(messages, str):
        is_list = isinstance(messages, Sequence) and not isinstance(messages, bytes)
        if not is_list or not all(isinstance(message, Mapping) for message in messages):
            raise TypeError(
                f"it returned {str(value)[:60]!r}, a {type(value).__name__}, and must return a text, messages, a Reply "
                "or None; a reward and the end belong in Reply(messages, reward, done)"
            )
        for message in messages:
            # The chat template decides whether lists of parts, and messages with only calls, are valid, as for prompts.
            is_content = isinstance(message.get("content"), str | list) or message.get("tool_calls")
            if not isinstance(message.get("role"), str) or not is_content:
                raise TypeError(
                    f"it returned the message {str(message)[:60]}, which needs a `role` and a `content`"
                )
        try:
            messages = with_content(messages)
        except ValueError as error:
            raise TypeError(f"it returned a message with an image: {error}") from error
    # A reply may repeat the policy's text, which may hold lone surrogates.
    messages = escaped_halves(messages)
    # bool("False") is True.
    if reply.done not in (True, False, None):
        raise TypeError(f"it returned done={reply.done!r}, which must be True or False")
    return Reply(messages, to_reward(reply.reward), bool(reply.done), to_metrics(reply.metrics))


def to_reward(value: Any) -> float | None:
    """Convert a reward to a float, or None if there is none; raise `TypeError` unless it is finite."""
    number = None if value is None else _number("reward", value)
    if number is not None and not abs(number) <= MAX_REWARD:
        raise TypeError(f"it returned the reward {number}, which must be finite in float32")
    return number


def to_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert metrics to floats; raise `TypeError` for a value that is not a number."""
    if not isinstance(values, Mapping):
        raise TypeError(f"it returned the metrics {str(values)[:60]}, which must be a mapping of numbers")
    return {str(name): _number(f"metric {name!r}", value) for name, value in values.items()}


def _number(what: str, value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"it returned the {what} {value[:60]!r}, which must be a number")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"it returned the {what} {str(value)[:60]}, which must be a number") from error


def kind_of(environment: Any, where: str) -> str:
    """Return the form of an environment or its class: ``step``, ``respond`` or ``trl``.

    Raises:
        ConfigError: The environment has none of these forms.
    """
    if callable(getattr(environment, "step", None)):
        return "step"
    if callable(getattr(environment, "respond", None)):
        return "respond"
    reset = getattr(environment, "reset", None)
    # TRL passes every column by name to reset(). With reset(row), a misspelt `step` must not become a tool.
    if (
        callable(reset)
        and {"prompt", inspect.Parameter.VAR_KEYWORD} & _parameters(reset)
        and trl_tools(environment)
    ):
        return "trl"
    # This imports pydantic, which the workers do not need.
    from vectorlm.settings import nearest

    others = [name for name in dir(environment) if not name.startswith("_")]
    meant = f" {near}" if (near := nearest("step", others)) else ""
    raise ConfigError(
        f"the environment {where!r} has no method `step`.{meant} Give it step(message), which returns a "
        "Reply, messages, a text or None; or respond(text); or TRL's reset(**row) with tools."
    )


def _parameters(function: Callable[..., Any]) -> set[Any]:
    """Return the names and the kinds of a function's parameters."""
    # A call of a decorated function calls the wrapper.
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    return {*parameters, *(parameter.kind for parameter in parameters.values())}


def trl_tools(environment: Any) -> list[Callable[..., Any]]:
    """Return the tools of an environment of TRL's form: all public methods but `reset`, `close` and `get_reward`."""
    names = [name for name in dir(environment) if not name.startswith("_")]
    others = {"reset", "close", "get_reward"}
    return [
        getattr(environment, name)
        for name in names
        if name not in others and inspect.isroutine(getattr(environment, name))
    ]


def tools_of(environment: Any, kind: str) -> list[Callable[..., Any]]:
    """Return the tools of an environment."""
    if kind == "trl":
        return trl_tools(environment)
    tools = getattr(environment, "tools", ())
    # A class may have a property.
    return [] if isinstance(tools, property) else list(tools)


def make_environment(make: Callable[..., Any], columns: Mapping[str, Any]) -> Any:
    """Call a class or a function with the columns that it names, or with all if it takes ``**columns``."""
    parameters = inspect.signature(make).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return make(**{name: value for name, value in columns.items() if takes_all or name in names})


def is_asynchronous(environment: Any, where: str) -> bool:
    """Return whether every method and tool is a coroutine function: then many environments can share one process."""
    methods = (
        getattr(environment, name, None) for name in ("reset", "step", "respond", "close", "get_reward")
    )
    calls = [method for method in methods if method is not None]
    return all(
        map(inspect.iscoroutinefunction, (*calls, *tools_of(environment, kind_of(environment, where))))
    )


async def value_of(found: Any) -> Any:
    """Return the result of a method or a tool; await it if it is awaitable."""
    return await found if inspect.isawaitable(found) else found


class _Respond:
    """An adapter of the form `respond` to the form `step`."""

    def __init__(self, environment: Any) -> None:
        self._respond, self.tools = environment.respond, getattr(environment, "tools", ())

    def step(self, message: Message) -> Any:
        return self._respond(message["content"])


class _TRL:
    """An adapter of TRL's form to the form `step`: a turn that calls no tool ends the rollout."""

    def __init__(self, environment: Any) -> None:
        self._reset, self.tools = environment.reset, trl_tools(environment)

    def reset(self, row: Mapping[str, Any]) -> Any:
        return self._reset(**row)

    def step(self, message: Message) -> None:
        return None


class Player:
    """Plays an environment of any form for one rollout."""

    def __init__(
        self, environment: Any, where: str, value_of: Callable[[Any], Awaitable[Any]] = value_of
    ) -> None:
        """Take the object and its name; `value_of` awaits the results of its methods."""
        forms: dict[str, Callable[[Any], Any]] = {"respond": _Respond, "trl": _TRL}
        self._environment, self._value_of = environment, value_of
        form = forms.get(kind_of(environment, where))
        self._turns = environment if form is None else form(environment)
        self.tools = self._own_tools()
        """Tools that the policy may call, by name."""
        self._num_calls = self._num_errors = 0

    async def reset(self, prompt: Any, columns: Mapping[str, Any]) -> Any:
        """Return the prompt with the messages that the environment adds."""
        added = None
        if hasattr(self._turns, "reset"):
            added = await self._value_of(self._turns.reset({**columns, "prompt": prompt}))
        self.tools = self._own_tools()
        if added is None:
            return prompt
        if not is_messages(prompt):
            raise TypeError("reset() adds messages, so the prompt must be chat messages")
        if isinstance(added, str) and isinstance(self._turns, _TRL):
            content = prompt[-1]["content"]
            more = (
                content + added if isinstance(content, str) else [*content, {"type": "text", "text": added}]
            )
            return [*prompt[:-1], {**prompt[-1], "content": more}]
        messages = to_reply(added).messages
        if isinstance(messages, str):
            raise TypeError("reset() returned a text, and must return messages or None")
        return [*prompt, *messages]

    def _own_tools(self) -> dict[str, Callable[..., Any]]:
        tools = getattr(self._turns, "tools", ())
        return {getattr(tool, "__name__", str(tool)): tool for tool in tools}

    async def step(self, text: str) -> tuple[Message, Reply]:
        """Return the policy's turn as a message, and the reply to it."""
        text = escaped_halves(text)
        content, calls = parse_calls(text, list(self.tools)) if self.tools else (text, [])
        # Ids count the calls: a repeated run must have the same tokens.
        calls = [
            replace(call, id=str(self._num_calls + place).zfill(CALL_ID_LENGTH))
            for place, call in enumerate(calls)
        ]
        self._num_calls += len(calls)
        message = message_of(content if calls else text, calls)
        if calls:
            results = [await call_tool(call, self.tools, self._value_of) for call in calls]
            self._num_errors += sum(is_error for _, is_error in results)
            reply = Reply([result for result, _ in results])
        else:
            reply = to_reply(await self._value_of(self._turns.step(message)))
        if not self.tools:
            return message, reply
        counts = {"tool_calls": float(self._num_calls), "tool_errors": float(self._num_errors)}
        return message, replace(reply, metrics={**counts, **reply.metrics})

    async def close(self) -> float | None:
        """Close the environment; return the reward that TRL's form gives the whole rollout."""
        reward = None
        if isinstance(self._turns, _TRL) and hasattr(self._environment, "get_reward"):
            reward = await self._value_of(self._environment.get_reward())
        if hasattr(self._environment, "close"):
            await self._value_of(self._environment.close())
        return to_reward(reward)
