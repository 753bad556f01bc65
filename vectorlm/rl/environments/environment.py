"""What one rollout talks to between its turns: a tool, a game, a user."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vectorlm.data.encoding import escaped_halves, is_messages
from vectorlm.errors import ConfigError
from vectorlm.rl.environments.tools import CALL_ID_LENGTH, call_tool, message_of, parse_calls
from vectorlm.types import MAX_REWARD

AGENT = "openai:"
"""How ``rl.environment`` begins where it names an agent, which asks over HTTP."""
Message = Mapping[str, Any]
"""A chat message: ``{"role", "content"}``, and ``tool_calls`` where the policy called tools."""


@dataclass(frozen=True)
class Reply:
    """What an environment answers to a turn."""

    messages: str | Sequence[Message] = ()
    """What the policy reads next. Messages go through the chat template; a text goes on in the policy's own turn."""
    reward: float | None = None
    """A reward for this turn."""
    done: bool = False
    """Whether the rollout has ended."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log; an evaluation counts an answer as right where `acc` is 1, if there is one."""


class Environment(Protocol):
    """What one rollout talks to; each has an object of its own. Every method may be a coroutine function.

    It may have `tools`, functions with type hints and docstrings. The policy is told of them, and what it calls is
    answered without `step`, which gets the messages that call none.

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
        """Begin with a prompt's columns; return messages to add to the prompt, or None."""

    def step(self, message: Message) -> Any:
        """Return a `Reply`, or its messages alone; None ends the rollout."""

    def close(self) -> Any:
        """Let go of what the rollout held."""


def to_reply(value: Any) -> Reply:
    """Return what an environment answered as a `Reply`.

    Raises:
        TypeError: It is neither text nor messages, or a part of it has another type.
    """
    if value is None:
        return Reply(done=True)
    reply = value if isinstance(value, Reply) else Reply(value)
    messages = [reply.messages] if isinstance(reply.messages, Mapping) else reply.messages
    if not isinstance(messages, str):
        is_list = isinstance(messages, Sequence) and not isinstance(messages, bytes)
        if not is_list or not all(isinstance(each, Mapping) for each in messages):
            raise TypeError(
                f"it returned {str(value)[:60]!r}, a {type(value).__name__}, and must return a text, messages, a Reply "
                "or None; a reward and the end belong in Reply(messages, reward, done)"
            )
        for each in messages:
            # Of parts, or of calls alone, the chat template makes what it will, as of prompts.
            is_content = isinstance(each.get("content"), str | list) or each.get("tool_calls")
            if not isinstance(each.get("role"), str) or not is_content:
                raise TypeError(
                    f"it returned the message {str(each)[:60]}, which needs a `role` and a `content`"
                )
        messages = list(messages)
    # It may repeat what the policy wrote.
    messages = escaped_halves(messages)
    # Not by its truth: "False" is a text that is not empty.
    if reply.done not in (True, False, None):
        raise TypeError(f"it returned done={reply.done!r}, which must be True or False")
    return Reply(messages, to_reward(reply.reward), bool(reply.done), to_metrics(reply.metrics))


def to_reward(value: Any) -> float | None:
    """Return what an environment gave as a float, None where it is none; raise `TypeError` unless it is finite."""
    number = None if value is None else _number("reward", value)
    if number is not None and not abs(number) <= MAX_REWARD:
        raise TypeError(f"it returned the reward {number}, which must be finite in float32")
    return number


def to_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return what an environment measured as floats; raise `TypeError` for what is no number."""
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
    """Return which form an environment has, or its class: ``step``, ``respond`` or ``trl``.

    Raises:
        ConfigError: It has none.
    """
    if callable(getattr(environment, "step", None)):
        return "step"
    if callable(getattr(environment, "respond", None)):
        return "respond"
    reset = getattr(environment, "reset", None)
    # TRL gives it every column by name: a misspelt `step` beside reset(row) is no tool.
    if (
        callable(reset)
        and {"prompt", inspect.Parameter.VAR_KEYWORD} & _parameters(reset)
        and trl_tools(environment)
    ):
        return "trl"
    # It imports pydantic, which the workers do without.
    from vectorlm.settings import nearest

    others = [name for name in dir(environment) if not name.startswith("_")]
    meant = f" {near}" if (near := nearest("step", others)) else ""
    raise ConfigError(
        f"the environment {where!r} has no method `step`.{meant} Give it step(message), which returns a "
        "Reply, messages, a text or None; or respond(text); or TRL's reset(**row) with tools."
    )


def _parameters(function: Callable[..., Any]) -> set[Any]:
    """Return the names and the kinds of a function's parameters."""
    # What is called is the wrapper of a decorated function.
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    return {*parameters, *(each.kind for each in parameters.values())}


def trl_tools(environment: Any) -> list[Callable[..., Any]]:
    """Return the tools of an environment of TRL's form: its public methods but `reset`, `close` and `get_reward`."""
    names = [name for name in dir(environment) if not name.startswith("_")]
    others = {"reset", "close", "get_reward"}
    return [
        getattr(environment, name)
        for name in names
        if name not in others and inspect.isroutine(getattr(environment, name))
    ]


def tools_of(environment: Any, kind: str) -> list[Callable[..., Any]]:
    """Return the tools of an environment."""
    return trl_tools(environment) if kind == "trl" else list(getattr(environment, "tools", ()))


def make_environment(make: Callable[..., Any], columns: Mapping[str, Any]) -> Any:
    """Call a class or a function with the columns that it names, or all of them where it takes ``**columns``."""
    parameters = inspect.signature(make).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = {each.name for each in parameters}
    return make(**{name: value for name, value in columns.items() if takes_all or name in names})


def is_asynchronous(environment: Any, where: str) -> bool:
    """Return whether every method and tool is a coroutine function, so that many environments share one process."""
    methods = (
        getattr(environment, name, None) for name in ("reset", "step", "respond", "close", "get_reward")
    )
    calls = [each for each in methods if each is not None]
    return all(
        map(inspect.iscoroutinefunction, (*calls, *tools_of(environment, kind_of(environment, where))))
    )


async def value_of(found: Any) -> Any:
    """Return what a method or a tool returned, or, from a coroutine function, what it returns in the end."""
    return await found if inspect.isawaitable(found) else found


class Player:
    """Plays an environment of any form for one rollout."""

    def __init__(
        self, environment: Any, where: str, value_of: Callable[[Any], Awaitable[Any]] = value_of
    ) -> None:
        """Take the object and its name; `value_of` waits for what its methods return."""
        self._environment, self._kind, self._value_of = environment, kind_of(environment, where), value_of
        self.tools = self._own_tools()
        """What the policy may call, by name."""
        self._num_calls = 0

    async def reset(self, prompt: Any, columns: Mapping[str, Any]) -> Any:
        """Return the whole prompt."""
        whole = await self._begin(prompt, columns)
        # TRL takes the methods of the object that it makes.
        if self._kind != "trl":
            self.tools = self._own_tools()
        return whole

    def _own_tools(self) -> dict[str, Callable[..., Any]]:
        tools = tools_of(self._environment, self._kind)
        return {getattr(tool, "__name__", str(tool)): tool for tool in tools}

    async def _begin(self, prompt: Any, columns: Mapping[str, Any]) -> Any:
        if self._kind == "respond" or not hasattr(self._environment, "reset"):
            return prompt
        row = {**columns, "prompt": prompt}
        begin = self._environment.reset
        added = await self._value_of(begin(**row) if self._kind == "trl" else begin(row))
        if added is None:
            return prompt
        if not is_messages(prompt):
            raise TypeError("reset() adds to the prompt, which must be chat messages then")
        if self._kind == "trl" and isinstance(added, str):
            return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + added}]
        messages = to_reply(added).messages
        if isinstance(messages, str):
            raise TypeError("reset() returned a text, and must return messages or None")
        return [*prompt, *messages]

    async def step(self, text: str) -> tuple[Message, Reply]:
        """Return what the policy said as a message, and the reply."""
        text = escaped_halves(text)
        content, calls = parse_calls(text, list(self.tools)) if self.tools else (text, [])
        # Of the order of the calls: the tokens of a run that is repeated are the same.
        calls = [
            replace(each, id=str(self._num_calls + place).zfill(CALL_ID_LENGTH))
            for place, each in enumerate(calls)
        ]
        self._num_calls += len(calls)
        message = message_of(content if calls else text, calls)
        if calls:
            return message, Reply([await call_tool(each, self.tools, self._value_of) for each in calls])
        if self._kind == "trl":
            return message, Reply(done=True)
        if self._kind == "respond":
            return message, to_reply(await self._value_of(self._environment.respond(text)))
        return message, to_reply(await self._value_of(self._environment.step(message)))

    async def close(self) -> float | None:
        """Close the environment; return the reward that one of TRL's form gives the whole rollout."""
        reward = None
        if self._kind == "trl" and hasattr(self._environment, "get_reward"):
            reward = await self._value_of(self._environment.get_reward())
        if hasattr(self._environment, "close"):
            await self._value_of(self._environment.close())
        return to_reward(reward)
