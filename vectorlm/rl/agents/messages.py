"""Requests and answers of the gateway in the form of Anthropic's Messages API, ``/v1/messages``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vectorlm.data.encoding import text_of_message
from vectorlm.errors import VectorLMError
from vectorlm.rl.agents.forms import Form, Strict, answer_with_ids
from vectorlm.rl.agents.session import RequestError, Session, Turn
from vectorlm.sampling.handle import Hear
from vectorlm.types import Completion

ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}
"""Anthropic's type of an error by its status; other statuses are invalid requests."""
THOUGHTS = ("thinking", "redacted_thinking")
"""Types of blocks that are not rendered, because the policy's thoughts are part of its text."""


class Tool(BaseModel):
    """A tool that the policy may call."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str = ""
    input_schema: dict[str, Any]


class ToolChoice(BaseModel):
    """The choice whether the policy may call a tool; a request cannot force a call."""

    model_config = ConfigDict(extra="allow")
    type: Literal["auto", "none"]


class Message(BaseModel):
    """A message of text, or of blocks."""

    model_config = ConfigDict(extra="allow")
    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class MessagesRequest(Strict):
    """A request to ``/v1/messages``."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    stream: bool | None = None
    # These fields do not change the samples.
    metadata: Any = None
    service_tier: Any = None

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template; None if there are none."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return None
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in self.tools or ()
        ] or None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is sent while it is sampled; with tools it is not, because calls are parsed at the end."""
        return bool(self.stream) and not self.offered

    async def answer(self, session: Session, hear: Hear | None = None) -> list[Turn]:
        """Send the request to the session."""
        names = ("max_tokens", "temperature", "top_p", "top_k")
        params = {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}
        return await session.chat(list(self._chat()), self.offered, params, hear)

    def _chat(self) -> Iterator[dict[str, Any]]:
        """Yield the messages in the form of chat templates."""
        if self.system:
            yield {"role": "system", "content": _content_of(self.system, "system")}
        for index, message in enumerate(self.messages):
            if isinstance(message.content, str):
                yield {"role": message.role, "content": message.content}
                continue
            texts, calls, results = list[Any](), list[Any](), list[Any]()
            for block in message.content:
                match block.get("type"):
                    case "text" | "image":
                        texts.append(block)
                    case "tool_use":
                        function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                        calls.append({"id": block.get("id"), "type": "function", "function": function})
                    case "tool_result":
                        told = _content_of(block.get("content"), f"messages[{index}].content")
                        name = block.get("tool_use_id")
                        results.append({"role": "tool", "tool_call_id": name, "content": told})
                    case kind if kind not in THOUGHTS:
                        place = f"messages[{index}].content"
                        raise RequestError(f"{place}: a block of the type {kind!r} is not supported.", place)
            yield from results
            if texts or calls or not results:
                said = {
                    "role": message.role,
                    "content": _content_of(texts, f"messages[{index}].content"),
                }
                yield said | ({"tool_calls": calls} if calls else {})

    def shown(self, turns: Sequence[Turn], form: Form) -> dict[str, Any]:
        """Return the body of the answer."""
        (turn,) = turns
        message = answer_with_ids(turn, self.offered)
        calls = message.get("tool_calls", ())
        blocks = [{"type": "text", "text": message["content"]}] if message["content"] or not calls else []
        blocks += [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": call["function"]["arguments"],
            }
            for call in calls
        ]
        stop = form.stopped_by(turn, self.stop_sequences or ())
        reason = "tool_use" if calls else "stop_sequence" if stop is not None else "end_turn"
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": form.model,
            "content": blocks,
            "stop_reason": "max_tokens" if turn.completion.finish_reason == "length" else reason,
            "stop_sequence": stop,
            "usage": {
                "input_tokens": len(turn.completion.prompt_token_ids),
                "output_tokens": len(turn.completion.token_ids),
            },
        }

    def events(self, form: Form) -> MessageEvents:
        """Return the stream of the answer."""
        return MessageEvents(self, form)

    @classmethod
    def refusal(cls, error: RequestError | VectorLMError) -> dict[str, Any]:
        """Return the body of an error."""
        kind = ERRORS.get(getattr(error, "status", 400), "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}

    @classmethod
    def refusal_event(cls, error: RequestError | VectorLMError) -> str:
        """Return an error as an event of a stream."""
        return _event(
            "error", **{name: value for name, value in cls.refusal(error).items() if name != "type"}
        )


def _content_of(content: Any, place: str) -> str | list[dict[str, Any]]:
    """Return the text of blocks, or a list of parts if a block is an image.

    Raises:
        RequestError: A block has another type, or an image has no source.
    """
    blocks, parts, has_images = content if isinstance(content, list) else [], list[dict[str, Any]](), False
    for block in blocks:
        if block.get("type") == "image":
            source, has_images = block.get("source") or {}, True
            url = f"data:;base64,{source.get('data')}" if source.get("data") else source.get("url")
            if not url:
                raise RequestError(f"{place}: an image needs a source of the type base64 or url.", place)
            parts.append({"type": "image_url", "image_url": {"url": url}})
        elif block.get("type") == "text":
            parts.append({"type": "text", "text": block.get("text")})
        else:
            raise RequestError(f"{place}: a block of the type {block.get('type')!r} is not supported.", place)
    return parts if has_images else text_of_message({"content": content})


class MessageEvents:
    """An answer as Anthropic's server-sent events."""

    def __init__(self, asked: MessagesRequest, form: Form) -> None:
        self._asked, self._form = asked, form
        self._num_characters = 0
        self._has_begun = False

    def part(self, completion: Completion) -> str:
        """Return the events for the tokens since the last part."""
        events = ""
        if not self._has_begun:
            events = self._begin(self._asked.shown([Turn(completion, None, (), "", None)], self._form))
            events += _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        self._num_characters += len(completion.text)
        return events + _text(completion.text)

    def rest(self, turns: Sequence[Turn]) -> Iterator[str]:
        """Yield the events of the complete answer, without the parts already sent."""
        body = self._asked.shown(turns, self._form)
        is_open = self._has_begun
        if not is_open:
            yield self._begin(body)
        for index, block in enumerate(body["content"]):
            if not is_open:
                empty: dict[str, Any] = {"text": ""} if block["type"] == "text" else {"input": {}}
                yield _event("content_block_start", index=index, content_block={**block, **empty})
            if block["type"] == "text":
                yield _text(block["text"][self._num_characters :])
            else:
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
            is_open = False
        ending = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=ending, usage=body["usage"])
        yield _event("message_stop")

    def _begin(self, body: Mapping[str, Any]) -> str:
        self._has_begun = True
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**body, **empty})


def _text(text: str) -> str:
    return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
