"""The requests that a gateway takes, in OpenAI's forms and vLLM's, and its answers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vectorlm.engine.local_requests import Hear
from vectorlm.rollouts.session import Session, Turn, spoken
from vectorlm.types import Completion

MAX_ANSWERS = 64
"""Answers to one request."""
Zero = Annotated[float, Field(ge=0, le=0)] | None
"""A penalty would change what is sampled from, and the trainer does not follow it."""


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    include_usage: bool = False


class Sampling(BaseModel):
    """Parameters of a request; fields that are not listed are refused by name."""

    model_config = ConfigDict(extra="forbid")

    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None

    def params(self) -> dict[str, Any]:
        """Return the engine's parameters."""
        names = set(Sampling.model_fields) - {"presence_penalty", "frequency_penalty"}
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Request(Sampling):
    """What chats and texts have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # They change nothing that is sampled.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    cache_salt: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is sent as it is sampled."""
        return bool(self.stream) and self.n in (None, 1)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class Function(BaseModel):
    """A call's name and arguments."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class Call(BaseModel):
    """A call of a tool."""

    model_config = ConfigDict(extra="allow")
    function: Function


class Message(BaseModel):
    """A chat message."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Call] | None = None


class ChatRequest(Request):
    """``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=0)

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is sent as it is sampled; calls of tools are read when it is whole."""
        return super().is_streamed and not self.offered

    async def answer(self, session: Session, hear: Hear | None = None) -> list[Turn]:
        """Ask the session."""
        params = self.params()
        if self.max_completion_tokens is not None:
            params["max_tokens"] = self.max_completion_tokens
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        return await session.chat(messages, self.offered, params, hear)

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools that the policy is told of."""
        return None if self.tool_choice == "none" else self.tools or None

    def shown(self, turns: Sequence[Turn], form: Form) -> dict[str, Any]:
        """Return the body of the answer."""
        choices = []
        for index, turn in enumerate(turns):
            message = spoken(turn.completion.text, self.offered)
            for call in message.get("tool_calls", ()):
                call["id"] = f"call_{uuid.uuid4().hex[:24]}"
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            reason = "tool_calls" if "tool_calls" in message else turn.completion.finish_reason
            choice = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
            if self.logprobs:
                choice["logprobs"] = {"content": form.logprobs(turn, bool(self.return_tokens_as_token_ids))}
            choices.append(choice | form.ids(turn, bool(self.return_token_ids)))
        return form.body("chat.completion", choices, turns, bool(self.return_token_ids))


class TextRequest(Request):
    """``/v1/completions``."""

    prompt: str | list[int]
    logprobs: int | None = Field(None, ge=0, le=1)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    async def answer(self, session: Session, hear: Hear | None = None) -> list[Turn]:
        """Ask the session."""
        return await session.write_on(self.prompt, self.params(), hear)

    def shown(self, turns: Sequence[Turn], form: Form) -> dict[str, Any]:
        """Return the body of the answer."""
        choices = []
        for index, turn in enumerate(turns):
            choice: dict[str, Any] = {
                "index": index,
                "text": turn.completion.text,
                "finish_reason": turn.completion.finish_reason,
                "logprobs": None,
            }
            if self.logprobs is not None:
                found = form.logprobs(turn, bool(self.return_tokens_as_token_ids))
                choice["logprobs"] = {
                    "tokens": [each["token"] for each in found],
                    "token_logprobs": [each["logprob"] for each in found],
                    "top_logprobs": None,
                    "text_offset": [],
                }
            choices.append(choice | form.ids(turn, bool(self.return_token_ids)))
        return form.body("text_completion", choices, turns, bool(self.return_token_ids))


class TokenSampling(Sampling):
    """Parameters of ``/inference/v1/generate``."""

    logprobs: int | None = Field(None, ge=0, le=1)
    detokenize: bool | None = None


class TokenRequest(BaseModel):
    """``/inference/v1/generate``: tokens in, tokens out."""

    model_config = ConfigDict(extra="forbid")
    token_ids: list[int] = Field(min_length=1)
    sampling_params: TokenSampling = Field(default_factory=lambda: TokenSampling.model_validate({}))
    model: str | None = None
    stream: Literal[False] | None = None
    request_id: str | None = None
    cache_salt: Any = None
    priority: Any = None
    return_token_ids: Any = None

    async def answer(self, session: Session) -> list[Turn]:
        """Ask the session."""
        return await session.write_on(self.token_ids, self.sampling_params.params())

    def shown(self, turns: Sequence[Turn], form: Form) -> dict[str, Any]:
        """Return the body of the answer."""
        choices = [
            {
                "index": index,
                "token_ids": turn.completion.token_ids,
                "finish_reason": turn.completion.finish_reason,
                "logprobs": {"content": form.logprobs(turn, as_ids=True)},
                "versions": turn.completion.versions,
            }
            for index, turn in enumerate(turns)
        ]
        return {"request_id": self.request_id or uuid.uuid4().hex, "choices": choices}


class Form:
    """What answers say of the model and its tokens."""

    def __init__(self, model: str, tokenizer: Any) -> None:
        self.model, self._tokenizer = model, tokenizer

    def logprobs(self, turn: Turn, as_ids: bool) -> list[dict[str, Any]]:
        """Return the log-probability of each token, of what it was drawn from."""
        found: list[dict[str, Any]] = []
        for token, logprob in zip(turn.completion.token_ids, turn.completion.sampler_logprobs, strict=True):
            text = f"token_id:{token}" if as_ids else self._tokenizer.decode([token])
            found.append({"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []})
        return found

    def ids(self, turn: Turn, is_asked: bool) -> dict[str, Any]:
        """Return a choice's tokens, each with the version of the weights that sampled it."""
        return (
            {"token_ids": turn.completion.token_ids, "versions": turn.completion.versions} if is_asked else {}
        )

    def body(self, kind: str, choices: list[Any], turns: Sequence[Turn], with_ids: bool) -> dict[str, Any]:
        """Return an answer of OpenAI's form."""
        num_prompt = len(turns[0].completion.prompt_token_ids)
        num_sampled = sum(len(turn.completion.token_ids) for turn in turns)
        found = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_sampled,
                "total_tokens": num_prompt + num_sampled,
            },
        }
        return found | ({"prompt_token_ids": turns[0].completion.prompt_token_ids} if with_ids else {})


class Events:
    """An answer as server-sent events."""

    def __init__(self, asked: ChatRequest | TextRequest, form: Form) -> None:
        self._asked, self._form = asked, form
        self._head: dict[str, Any] = {}
        self._num_tokens = self._num_characters = 0

    def part(self, completion: Completion) -> str:
        """Return the event of what was sampled of a single answer since the last part."""
        self._num_tokens += len(completion.token_ids)
        self._num_characters += len(completion.text)
        is_first = not self._head
        body = self._begun(self._asked.shown([Turn(completion, None, (), "", None)], self._form))
        return self._piece(body["choices"][0], is_first)

    def rest(self, turns: Sequence[Turn]) -> Iterator[str]:
        """Yield the events of whole answers, without what was told of a single one."""
        is_first = not self._head
        body = self._begun(self._asked.shown(turns, self._form))
        left = [replace(turn, completion=self._left_of(turn.completion)) for turn in turns]
        for choice in self._asked.shown(left, self._form)["choices"]:
            yield self._piece(choice, is_first)
            end: dict[str, Any] = {"delta": {}} if "message" in choice else {"text": ""}
            for name in ("index", "finish_reason"):
                end[name] = choice[name]
            yield _event({**self._head, "choices": [end]})
        if self._asked.with_usage:
            yield _event({**self._head, "choices": [], "usage": body["usage"]})
        yield "data: [DONE]\n\n"

    def _begun(self, body: dict[str, Any]) -> dict[str, Any]:
        """Take over what all events have in common; parts know no prompt."""
        if not self._head:
            self._head = {name: body[name] for name in ("id", "object", "created", "model")}
            if self._head["object"] == "chat.completion":
                self._head["object"] = "chat.completion.chunk"
        if prompt := body.get("prompt_token_ids"):
            self._head["prompt_token_ids"] = prompt
        return body

    def _left_of(self, whole: Completion) -> Completion:
        start = self._num_tokens
        return replace(
            whole,
            token_ids=whole.token_ids[start:],
            sampler_logprobs=whole.sampler_logprobs[start:],
            versions=whole.versions[start:],
            text=whole.text[self._num_characters :],
        )

    def _piece(self, choice: Mapping[str, Any], is_first: bool) -> str:
        piece = {**choice, "finish_reason": None}
        if "message" in piece:
            piece["delta"] = piece.pop("message")
            if not is_first:
                del piece["delta"]["role"]
            for place, call in enumerate(piece["delta"].get("tool_calls", ())):
                call["index"] = place
        return _event({**self._head, "choices": [piece]})


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
