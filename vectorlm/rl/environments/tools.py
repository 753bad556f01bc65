"""Tools: parse the calls in the policy's text, run them, and describe tools to the policy."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vectorlm.data.encoding import escaped_halves, require_whole_characters, without_thoughts
from vectorlm.data.images import is_image, looks_like_image, with_content
from vectorlm.errors import ConfigError
from vectorlm.plugin import text_of

HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"
MAX_DEPTH = 64
"""Maximum nesting of lists and objects; pickle and chat templates fail at a few hundred."""


CALL_ID_LENGTH = 9
"""Length of a call's id; Mistral's templates refuse any other length."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in the policy's text."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None
    """Why the text is not a valid call; None if it is one."""
    id: str = ""
    """The id that the call and its result share."""


def parse_calls(text: str, names: Collection[str] = ()) -> tuple[str, list[ToolCall]]:
    """Return the policy's text without its calls, and the calls.

    There are three forms of calls:

    - ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` (Hermes, Qwen);
    - ``{"name": …, "parameters": {…}}``, optionally after ``<|python_tag|>`` and joined by ``;`` (Llama 3);
    - plain JSON, an object or a list of objects, optionally in a fence. It is an answer and not a call if its name is
      not among `names` and it has other keys but no arguments.

    A text that is JSON from beginning to end has the plain form: tags in its strings are part of an argument.

    An invalid call becomes a `ToolCall` with an error, which the policy reads. Calls in thoughts are ignored.
    """
    said = without_thoughts(text)
    body = said.strip().removeprefix(PYTHON_TAG).strip()
    if body.startswith("```"):
        body = body.removeprefix("```").removeprefix("json").removesuffix("```").strip()
    may_be_plain = body.startswith(("{", "["))
    if "<tool_call>" in said and not (may_be_plain and _values(body)[1] is None):
        calls = [call for found in HERMES.findall(said) for call in _read(found)]
        return _without(text, [found[0] for found in HERMES.finditer(said)]), calls
    if not may_be_plain or '"name"' not in body or _is_answer(body, names):
        return text, []
    return _without(text, [said]), _read(body)


def _without(text: str, parts: Sequence[str]) -> str:
    """Remove the last occurrence of each part, because a thought may quote the part before."""
    for part in reversed(parts):
        text = "".join(text.rsplit(part, 1))
    return text.strip()


def require_plain(value: Any, depth: int = 0) -> Any:
    """Return a JSON value from the policy's text unchanged.

    Raises:
        ValueError: It is nested too deeply, or has NaN, infinity or lone surrogates, which templates and other
            processes cannot read.
    """
    inner = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else []
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    for part in inner:
        require_plain(part, depth + 1)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"it contains {value}, which is not a number in JSON")
    if isinstance(value, str):
        require_whole_characters(value)
    return value


def _is_answer(text: str, names: Collection[str]) -> bool:
    """Return whether a text is JSON with a name that is not a call, such as ``{"name": "Bob", "age": 3}``."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    values = found if isinstance(found, list) else [found]
    objects = [value for value in values if isinstance(value, dict)]
    keys = {key for value in objects for key in value}
    is_call = keys & {"arguments", "parameters", "function"} or not keys - {"name", "type", "id"}
    return not is_call and not any(value.get("name") in names for value in objects)


def message_of(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return the policy's text and calls as a chat message."""
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
    """Read the calls in the JSON of a text."""
    values, problem = _values(text)
    found = [
        call for value in values for call in map(_to_call, value if isinstance(value, list) else [value])
    ]
    if problem is not None:
        found.append(ToolCall("", {}, f"this call is not JSON: {problem}"))
    return found or [ToolCall("", {}, "this call is empty")]


def _values(text: str) -> tuple[list[Any], Exception | None]:
    """Read JSON values, one after the other or joined by ``;``; return the values before the first error, and it."""
    decoder, place = json.JSONDecoder(strict=False), 0
    found: list[Any] = []
    while text[place:].strip(" \n\t;"):
        place += len(text[place:]) - len(text[place:].lstrip(" \n\t;"))
        try:
            value, place = decoder.raw_decode(text, place)
            require_plain(value)
        except (ValueError, RecursionError) as error:
            return found, error
        found.append(value)
    return found, None


def _to_call(value: Any) -> ToolCall:
    value = value.get("function", value) if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, 'a call needs a "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        # OpenAI's form.
        try:
            arguments = require_plain(json.loads(arguments))
        except (ValueError, RecursionError) as error:
            return ToolCall(value["name"], {}, f"the arguments are not JSON: {error}")
    if not isinstance(arguments, Mapping):
        return ToolCall(value["name"], {}, "the arguments must be an object")
    return ToolCall(value["name"], arguments)


def schemas_of(tools: Sequence[Callable[..., Any]], where: str) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools, from their type hints and docstrings in Google's style.

    Raises:
        ConfigError: A tool has no types or no docstring; the text names it, with file and line.
    """
    # This imports torch.
    from transformers.utils import get_json_schema

    found = []
    for tool in tools:
        if not callable(tool):
            raise ConfigError(
                f"{where} has the tool {tool!r}, a {type(tool).__name__}: a tool must be a function. Correct it."
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
    """Return a key for the schema of a tool: its name, docstring and signature."""
    signature = str(inspect.signature(tool)) if callable(tool) else ""
    return getattr(tool, "__name__", str(tool)), tool.__doc__, signature


def tool_message(call: ToolCall, content: str | list[Any]) -> dict[str, Any]:
    """Return the chat message with the result of a call."""
    # Errors may quote lone surrogates.
    content = escaped_halves(content) if isinstance(content, str) else content
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


def content_of(result: Any) -> str | list[Any]:
    """Return a tool's result as the content of a message: its text, or its parts if it shows images.

    Raises:
        TypeError: An image is not in a list of parts, or a value cannot be written as JSON.
        ValueError: An image cannot be read, or the text has lone surrogates.
    """
    if isinstance(result, list) and any(map(is_image, result)):
        (message,) = with_content([{"content": result}])
        texts = [part for part in message["content"] if not is_image(part)]
        require_whole_characters(json.dumps(texts, ensure_ascii=False))
        return list(message["content"])
    content = result if isinstance(result, str) else json.dumps(result, default=_as_text)
    require_whole_characters(content)
    return content


def _as_text(value: Any) -> str:
    if looks_like_image(value) and not isinstance(value, Path):
        raise TypeError('a tool must return images as parts: [{"type": "image", "image": …}]')
    return str(value)


async def call_tool(
    call: ToolCall, tools: Mapping[str, Callable[..., Any]], value_of: Callable[[Any], Awaitable[Any]]
) -> tuple[dict[str, Any], bool]:
    """Run a tool; return the message with its result or its error, and whether it is an error.

    The policy reads the error and can correct its call. `value_of` awaits the result of a coroutine function.
    """
    if call.error is not None:
        return tool_message(call, f"error: {call.error}"), True
    if call.name not in tools:
        return tool_message(call, f"error: there is no tool {call.name!r}, only {', '.join(tools)}"), True
    try:
        found = await value_of(await _result_of(tools[call.name], call.arguments))
        content = content_of(found)
    except BaseException as error:  # A tool may run the policy's text, which may raise anything.
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        return tool_message(call, f"error: {type(error).__name__}: {text_of(error)}"), True
    return tool_message(call, content), False


async def _result_of(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a tool; on an event loop in a thread, because other environments share the loop, unless it is `async`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return tool(**arguments)
    if inspect.iscoroutinefunction(tool):
        return tool(**arguments)
    return await asyncio.to_thread(tool, **arguments)


def _is_cancelled() -> bool:
    """Return whether the caller's own task, if there is one, is being cancelled."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0
