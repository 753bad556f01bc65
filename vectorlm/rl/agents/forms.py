"""Requests and answers of the gateway, in the forms of OpenAI and vLLM."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vectorlm.errors import VectorLMError
from vectorlm.rl.agents.session import RequestError, Session, Turn, spoken
from vectorlm.rl.environments.tools import CALL_ID_LENGTH
from vectorlm.sampling.backends.generation import DEFAULTS, NEUTRAL
from vectorlm.sampling.handle import Hear
from vectorlm.types import Completion

MAX_ANSWERS = 64
"""Maximum number of answers to one request."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
CHANGES_NOTHING = {
    **vars(DEFAULTS),
    **NEUTRAL,
    **{
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "length_penalty": 1,
        "use_beam_search": False,
        "thinking": {"type": "disabled"},
    },
    **{"best_of": 1, "echo": False, "top_logprobs": 0, "stream": False, "max_tokens": None},
}
"""Accepted values of fields that have no effect, besides null and empty values."""
OTHER_DISTRIBUTION = "would make the engine sample from a different distribution than the trained policy's"
NOT_TAKEN = {
    "seed": "cannot be chosen: the run draws the seed of every request, so that a resumed run samples the same. Leave "
    "it out.",
    "response_format": f"{OTHER_DISTRIBUTION}. Set structured_outputs in the sampling_params of the run, which the "
    "trainer follows.",
    "tool_choice": f"{OTHER_DISTRIBUTION}: the policy must be free to call no tool. Use auto or none.",
    "max_tokens": "must be a whole number from 1 on, or null for the run's limit, which caps it.",
}


def answer_with_ids(turn: Turn, tools: Sequence[Any] | None) -> dict[str, Any]:
    """Return an answer as a message; the ids of its calls depend only on its tokens: a repeated run has equal ids."""
    message = spoken(turn.completion.text, tools)
    for place, call in enumerate(message.get("tool_calls", ())):
        call["id"] = hashlib.blake2b(repr((turn.token_ids, place)).encode()).hexdigest()[:CALL_ID_LENGTH]
    return message


class StreamOptions(BaseModel):
    """Options for a streamed answer."""

    include_usage: bool | None = None


class Strict(BaseModel):
    """A request body whose fields are all known, or have no effect."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if name in cls.model_fields
            or not (
                value in (None, {}, [], "") or (name in CHANGES_NOTHING and value == CHANGES_NOTHING[name])
            )
        }

    @classmethod
    def refusal(cls, error: RequestError | VectorLMError) -> dict[str, Any]:
        """Return the body of an error, in OpenAI's form."""
        fields = {name: getattr(error, name, None) for name in ("param", "code")}
        return {"error": {"message": str(error), "type": "invalid_request_error", **fields}}

    @classmethod
    def refusal_event(cls, error: RequestError | VectorLMError) -> str:
        """Return an error as an event of a stream."""
        return _event(cls.refusal(error))


class Sampling(Strict):
    """Sampling parameters of a request."""

    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    def params(self) -> dict[str, Any]:
        """Return the engine's parameters."""
        names = Sampling.model_fields
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Request(Sampling):
    """Fields shared by requests of chats and of texts."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # These fields do not change the samples.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    cache_salt: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None

    def events(self, form: Form) -> Events:
        """Return the stream of the answer."""
        assert isinstance(self, ChatRequest | TextRequest)
        return Events(self, form)

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is sent while it is sampled."""
        return bool(self.stream) and self.n in (None, 1)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


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
    """A request to ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: bool | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is sent while it is sampled; with tools it is not, because calls are parsed at the end."""
        return super().is_streamed and not self.offered

    async def answer(self, session: Session, hear: Hear | None = None) -> list[Turn]:
        """Send the request to the session."""
        params = self.params()
        if self.max_completion_tokens is not None:
            params["max_tokens"] = self.max_completion_tokens
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        return await session.chat(messages, self.offered, params, hear)

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template; None if there are none."""
        return None if self.tool_choice == "none" else self.tools or None

    def shown(self, turns: Sequence[Turn], form: Form) -> dict[str, Any]:
        """Return the body of the answer."""
        choices = []
        for index, turn in enumerate(turns):
            message = answer_with_ids(turn, self.offered)
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            reason = "tool_calls" if "tool_calls" in message else turn.completion.finish_reason
            choice = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
            if self.logprobs:
                choice["logprobs"] = {"content": form.logprobs(turn, bool(self.return_tokens_as_token_ids))}
            choices.append(choice | form.ids(turn, bool(self.return_token_ids)))
        return form.body("chat.completion", choices, turns, bool(self.return_token_ids))


class TextRequest(Request):
    """A request to ``/v1/completions``."""

    prompt: str | list[TokenId]
    logprobs: int | None = Field(None, ge=0, le=1)

    @field_validator("prompt", mode="before")
    @classmethod
    def _only(cls, prompt: Any) -> Any:
        if not isinstance(prompt, list) or not any(isinstance(part, str | list) for part in prompt):
            return prompt
        if len(prompt) > 1:
            raise ValueError("a request has one prompt. Ask for each by itself")
        return prompt[0]

    async def answer(self, session: Session, hear: Hear | None = None) -> list[Turn]:
        """Send the request to the session."""
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
                    "tokens": [token["token"] for token in found],
                    "token_logprobs": [token["logprob"] for token in found],
                    "top_logprobs": None,
                    "text_offset": [],
                }
            choices.append(choice | form.ids(turn, bool(self.return_token_ids)))
        return form.body("text_completion", choices, turns, bool(self.return_token_ids))


class TokenSampling(Sampling):
    """Sampling parameters of ``/inference/v1/generate``."""

    logprobs: int | None = Field(None, ge=0, le=1)
    detokenize: bool | None = None


class TokenRequest(Strict):
    """A request to ``/inference/v1/generate``, which takes tokens and returns tokens."""

    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: TokenSampling = Field(default_factory=lambda: TokenSampling.model_validate({}))
    model: str | None = None
    request_id: str | None = None
    cache_salt: Any = None
    priority: Any = None
    return_token_ids: Any = None

    async def answer(self, session: Session) -> list[Turn]:
        """Send the request to the session."""
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


def explained(error: ValidationError) -> RequestError:
    """Return the error of a refused body, with the wrong field."""
    # If a field has several forms, use the error of the form that matched furthest.
    first = max(error.errors(), key=lambda found: len(found["loc"]))
    names = [name for name in first["loc"] if isinstance(name, int) or name.isidentifier()]
    place = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    place, value = place.removeprefix("."), str(first["input"])[:60]
    why = NOT_TAKEN.get(str(first["loc"][0]) if len(first["loc"]) == 1 else "")
    if why is None and first["type"] == "extra_forbidden":
        why = (
            f"is not taken by this server: it would have no effect, or {OTHER_DISTRIBUTION}. Leave it out, or set it "
            "in the sampling_params of the run."
        )
    return RequestError(f"{place}: {first['msg']}" if why is None else f"{place}={value} {why}", place)


class Form:
    """The model's name and tokenizer, for answers."""

    def __init__(self, model: str, tokenizer: Any) -> None:
        self.model, self._tokenizer = model, tokenizer

    def logprobs(self, turn: Turn, as_ids: bool) -> list[dict[str, Any]]:
        """Return the log-probability of every token under the distribution that it was sampled from."""
        found: list[dict[str, Any]] = []
        for token, logprob in zip(turn.completion.token_ids, turn.completion.sampler_logprobs, strict=True):
            text = f"token_id:{token}" if as_ids else self._tokenizer.decode([token])
            found.append({"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []})
        return found

    def stopped_by(self, turn: Turn, stops: Sequence[str]) -> str | None:
        """Return the stop string that ended an answer, which the answer's text does not include; None if none did."""
        if turn.completion.finish_reason != "stop":
            return None
        end = self._tokenizer.decode(list(turn.completion.token_ids))[len(turn.completion.text) :]
        return next((stop for stop in stops if stop in end), None)

    def ids(self, turn: Turn, is_asked: bool) -> dict[str, Any]:
        """Return a choice's tokens and, for every token, the version of the weights that sampled it."""
        return (
            {"token_ids": turn.completion.token_ids, "versions": turn.completion.versions} if is_asked else {}
        )

    def body(self, kind: str, choices: list[Any], turns: Sequence[Turn], with_ids: bool) -> dict[str, Any]:
        """Return the body of an answer in OpenAI's form."""
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
        """Return the event for the tokens of a single answer since the last part."""
        self._num_tokens += len(completion.token_ids)
        self._num_characters += len(completion.text)
        is_first = not self._head
        body = self._begun(self._asked.shown([Turn(completion, None, (), "", None)], self._form))
        return self._piece(body["choices"][0], is_first)

    def rest(self, turns: Sequence[Turn]) -> Iterator[str]:
        """Yield the events of complete answers, without the parts already sent."""
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
        """Keep the fields that all events share; parts of an answer have no prompt."""
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
