"""Tools: what the policy may call, how it writes a call, and what it reads for one that fails."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vectorlm.data.encoding import escaped_halves, require_whole_characters, without_thoughts
from vectorlm.errors import ConfigError
from vectorlm.plugin import text_of

HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"
MAX_DEPTH = 64
"""Lists and objects within each other that are read: pickle and chat templates fail at some hundred."""


CALL_ID_LENGTH = 9
"""Letters and digits of a call's id: Mistral's templates refuse any other."""


@dataclass(frozen=True)
class ToolCall:
    """What the policy wrote to call a tool."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None
    """Why it is not a call."""
    id: str = ""
    """What the call and its result have in common."""


def parse_calls(text: str, names: Collection[str] = ()) -> tuple[str, list[ToolCall]]:
    """Return what the policy said beside its calls, and the calls.

    Three ways to write them are known: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` (Hermes, Qwen);
    ``{"name": …, "parameters": {…}}``, several joined by ``;``, maybe behind ``<|python_tag|>`` (Llama 3); and plain
    JSON, an object or a list of them, maybe in a fence. What begins like a call and is none is a `ToolCall` with an
    error, which the policy is told. Plain JSON with a name that is none of `names` and other keys, none of which are
    arguments, is an answer. The policy's thoughts hold no calls.
    """
    said = without_thoughts(text)
    if "<tool_call>" in said:
        calls = [call for found in HERMES.findall(said) for call in _read(found)]
        return _without(text, [found[0] for found in HERMES.finditer(said)]), calls
    body = said.strip().removeprefix(PYTHON_TAG).strip()
    if body.startswith("```"):
        body = body.removeprefix("```").removeprefix("json").removesuffix("```").strip()
    if not body.startswith(("{", "[")) or '"name"' not in body or _is_answer(body, names):
        return text, []
    return _without(text, [said]), _read(body)


def _without(text: str, parts: Sequence[str]) -> str:
    """Return a text without some of its parts; a thought that quotes one precedes it."""
    for part in reversed(parts):
        text = "".join(text.rsplit(part, 1))
    return text.strip()


def require_plain(value: Any, depth: int = 0) -> Any:
    """Return a JSON value that the policy wrote.

    Raises:
        ValueError: It is nested too deeply, or holds half a character: templates and other processes cannot take it.
    """
    inner = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else []
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    for each in inner:
        require_plain(each, depth + 1)
    if isinstance(value, str):
        require_whole_characters(value)
    return value


def _is_answer(text: str, names: Collection[str]) -> bool:
    """Return whether a text is JSON about something that has a name, such as ``{"name": "Bob", "age": 3}``."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    objects = [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, dict)]
    keys = {key for each in objects for key in each}
    is_call = keys & {"arguments", "parameters", "function"} or not keys - {"name", "type", "id"}
    return not is_call and not any(each.get("name") in names for each in objects)


def message_of(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return what the policy said as a chat message."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in calls
        ]
    return message


def _read(text: str) -> list[ToolCall]:
    """Read the objects of a text, laid end to end or joined by ``;``."""
    decoder, place, found = json.JSONDecoder(strict=False), 0, []
    while text[place:].strip(" \n\t;"):
        place += len(text[place:]) - len(text[place:].lstrip(" \n\t;"))
        try:
            value, place = decoder.raw_decode(text, place)
            require_plain(value)
        except (ValueError, RecursionError) as error:
            found.append(ToolCall("", {}, f"this call is not JSON: {error}"))
            break
        found += [_to_call(each) for each in (value if isinstance(value, list) else [value])]
    return found or [ToolCall("", {}, "this call is empty")]


def _to_call(value: Any) -> ToolCall:
    value = value.get("function", value) if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, 'a call needs a "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        # As OpenAI writes them.
        try:
            arguments = require_plain(json.loads(arguments))
        except (ValueError, RecursionError) as error:
            return ToolCall(value["name"], {}, f"the arguments are not JSON: {error}")
    if not isinstance(arguments, Mapping):
        return ToolCall(value["name"], {}, "the arguments must be an object")
    return ToolCall(value["name"], arguments)


def schemas_of(tools: Sequence[Callable[..., Any]], where: str) -> list[dict[str, Any]]:
    """Return the JSON schema of each tool, from its type hints and its docstring in Google's style.

    Raises:
        ConfigError: A tool lacks a type or a docstring; the text names it, with file and line.
    """
    # It imports torch.
    from transformers.utils import get_json_schema

    found = []
    for tool in tools:
        if not callable(tool):
            raise ConfigError(
                f"{where} has the tool {tool!r}, a {type(tool).__name__}: a tool must be a function."
            )
        try:
            found.append(get_json_schema(tool))
        except Exception as error:
            code = inspect.unwrap(getattr(tool, "__func__", tool)).__code__
            raise ConfigError(
                f"the tool {tool.__name__!r} of {where} cannot be described to the policy: {error} "
                f"({code.co_filename}:{code.co_firstlineno}). Give every argument a type, and a line under `Args:` of "
                "the docstring."
            ) from error
    return found


def identity_of(tool: Any) -> tuple[str, str | None, str]:
    """Return what the schema of a tool is made of."""
    signature = str(inspect.signature(tool)) if callable(tool) else ""
    return getattr(tool, "__name__", str(tool)), tool.__doc__, signature


def tool_message(call: ToolCall, content: str) -> dict[str, Any]:
    """Return what the policy reads for a call."""
    # Errors may quote half a character.
    return {
        "role": "tool",
        "tool_call_id": call.id,
        "name": call.name,
        "content": escaped_halves(content),
    }


async def call_tool(
    call: ToolCall, tools: Mapping[str, Callable[..., Any]], value_of: Callable[[Any], Awaitable[Any]]
) -> dict[str, Any]:
    """Return the message with what a tool returned, or with its error, so that the policy may mend the call.

    `value_of` waits for what a coroutine function returned.
    """
    if call.error is not None:
        return tool_message(call, f"error: {call.error}")
    if call.name not in tools:
        return tool_message(call, f"error: there is no tool {call.name!r}, only {', '.join(tools)}")
    try:
        found = await value_of(tools[call.name](**call.arguments))
        content = found if isinstance(found, str) else json.dumps(found, default=str)
        require_whole_characters(content)
    except BaseException as error:  # A tool may run what the policy wrote, which raises whatever it likes.
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        return tool_message(call, f"error: {type(error).__name__}: {text_of(error)}")
    return tool_message(call, content)


def _is_cancelled() -> bool:
    """Return whether the task of the caller, if it is in one, is itself cancelled."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0
