"""The requests that a gateway takes, in OpenAI's forms and vLLM's, and its answers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vectorlm.rollouts.session import Session, Turn, spoken

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

    async def answer(self, session: Session) -> list[Turn]:
        """Ask the session."""
        params = self.params()
        if self.max_completion_tokens is not None:
            params["max_tokens"] = self.max_completion_tokens
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        return await session.chat(messages, self.offered, params)

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

    async def answer(self, session: Session) -> list[Turn]:
        """Ask the session."""
        return await session.write_on(self.prompt, self.params())

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


def events(body: Mapping[str, Any], with_usage: bool) -> Iterator[str]:
    """Yield an answer as server-sent events: the engine hands over whole answers, so each choice is one piece."""
    head = {name: value for name, value in body.items() if name not in ("choices", "usage")}
    if head["object"] == "chat.completion":
        head["object"] = "chat.completion.chunk"
    for choice in body["choices"]:
        piece = dict(choice)
        if "message" in piece:
            piece["delta"] = piece.pop("message")
            for place, call in enumerate(piece["delta"].get("tool_calls", ())):
                call["index"] = place
        yield _event({**head, "choices": [{**piece, "finish_reason": None}]})
        rest: dict[str, Any] = {"delta": {}} if "message" in choice else {"text": ""}
        for name in ("index", "finish_reason"):
            rest[name] = choice[name]
        yield _event({**head, "choices": [rest]})
    if with_usage:
        yield _event({**head, "choices": [], "usage": body["usage"]})
    yield "data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
