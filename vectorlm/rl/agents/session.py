"""Build a rollout from the requests of an agent."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from vectorlm.data.encoding import (
    chat_of,
    encode,
    encode_behind,
    encode_reply,
    end_tokens,
    escaped_halves,
    plain_message,
)
from vectorlm.data.images import Picture, PicturedIds, image_tokens_of, images_of, with_content
from vectorlm.errors import RolloutError, VectorLMError
from vectorlm.rl.environments.tools import message_of, parse_calls
from vectorlm.rl.rollout import Rollout
from vectorlm.rl.rollouts.sampler import Ask
from vectorlm.sampling.handle import Hear
from vectorlm.types import POLICY, Completion, PromptRecord

FOLLOWED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Defaults of the sampling parameters that the trainer follows when it computes log-probabilities."""
MAX_REQUESTS = 1000
"""Maximum number of requests per session; it ends agents that would never stop."""


class RequestError(Exception):
    """An error of a request that cannot be answered; `param` is the wrong field, `status` the HTTP status."""

    def __init__(
        self, text: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(text)
        self.param, self.status, self.code = param, status, code


@dataclass(eq=False)
class Turn:
    """One answer of the policy."""

    completion: Completion
    before: Turn | None
    """The turn that this one continues; None for a first turn."""
    added: tuple[int, ...]
    """The tokens between the two turns, which the policy did not sample."""
    added_text: str
    said: Any
    """The beginning of every request that continues this turn: messages with tools, or a text."""
    chat: Sequence[Mapping[str, Any]] | None = None
    """All messages up to the end of this turn."""
    pictures: tuple[Picture, ...] = ()
    """The pictures in `added`."""
    is_read: bool = False
    """Whether the agent received the answer; unread answers are not part of the rollout."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens up to the end of this turn."""
        return self.completion.prompt_token_ids + self.completion.token_ids

    @property
    def path(self) -> list[Turn]:
        """All turns up to this one."""
        found: list[Turn] = [self]
        while found[-1].before is not None:
            found.append(found[-1].before)
        return found[::-1]


class Session:
    """The requests of one rollout. Create it on the event loop that samples; use it on the gateway's event loop."""

    def __init__(
        self,
        ask: Ask,
        tokenizer: Any,
        *,
        sampling: Mapping[str, Any],
        max_model_len: int,
        seed_of: Callable[[int], int] | None = None,
        is_trained_on: bool = True,
        is_free: bool = False,
    ) -> None:
        """Sample with `ask` and the parameters `sampling`; `seed_of` returns the seed of a request by its number.

        If the rollout is not trained on, `sampling` replaces a request's parameters in `FOLLOWED`. If `is_free`, the
        answers are no part of a rollout, and a request may change all parameters.
        """
        self.is_free = is_free
        self.key = secrets.token_urlsafe(32)
        """The key that requests of this session must carry."""
        self._ask, self._loop, self._tokenizer = ask, asyncio.get_running_loop(), tokenizer
        self._sampling, self._seed_of, self.max_model_len = sampling, seed_of, max_model_len
        self._is_trained_on = is_trained_on
        self._turns: list[Turn] = []
        self._num_requests = 0
        self.refusal = ""
        """Why the last request was refused; "" if it was answered."""
        self._parent: Session = self
        """The session of the rollout."""
        self._in_flight: set[Future[Sequence[Completion]]] = set()
        self._idle_since = math.inf
        self.is_full = False
        """Whether a request was refused because the context is full, and no later request was answered."""
        self._num_refused = 0
        """Number of tokens of the last refused prompt."""

    @property
    def idle_s(self) -> float:
        """Seconds since the agent started or received its last answer; at most 0 while it waits for one."""
        return 0.0 if self._in_flight else time.monotonic() - self._idle_since

    def begin(self) -> None:
        """Record that the agent has started."""
        self._idle_since = time.monotonic()

    def close(self) -> None:
        """Cancel the requests without an answer."""
        for sampled in list(self._in_flight):
            sampled.cancel()

    def beside(self, ask: Ask, model: str) -> Session:
        """Return a session for one request to `model` by `ask` whose answer is no part of this rollout."""
        number, seed_of, sampling = self._count_request(), self._seed_of, self._sampling
        # The run's grammar and stop strings fit the policy and its older versions, not a judge.
        if model.partition("@")[0] != POLICY:
            sampling = {name: sampling[name] for name in (*FOLLOWED, "max_tokens") if name in sampling}
        made = Session(
            ask,
            self._tokenizer,
            sampling=sampling,
            max_model_len=self.max_model_len,
            seed_of=None if seed_of is None else lambda further: seed_of(number + further),
            is_free=True,
        )
        made._in_flight, made._parent = self._in_flight, self
        return made

    def _count_request(self) -> int:
        """Count a new request, and return its number."""
        if self._num_requests == MAX_REQUESTS:
            raise RequestError(f"This session has made its {MAX_REQUESTS} requests.", status=429)
        self._num_requests += 1
        return self._num_requests - 1

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        params: Mapping[str, Any],
        hear: Hear | None = None,
    ) -> list[Turn]:
        """Answer chat messages; earlier answers among them keep the tokens that were sampled.

        `hear` receives a single answer while it is sampled, in another thread.
        """
        with _encoding("messages"):
            chat = [_for_template(message, index) for index, message in enumerate(messages)]
            key = [json.dumps(tools), *map(_comparable, chat)]
            before, ids = None, []
            if chat[-1]["role"] != "assistant":
                before = self._longest(
                    lambda said: isinstance(said, list) and key[: len(said)] == said, len(key)
                )
            if before is None:
                prompt = {"prompt": chat, "tools": tools} if tools else chat
                ids = encode(prompt, lambda: self._tokenizer)
            else:
                num_known = len(before.said) - 1
                written = before.completion.token_ids
                ids = encode_reply(chat[: num_known - 1], chat[num_known:], written, self._tokenizer, tools)
            text = "" if before is None else self._tokenizer.decode(ids)
            pictures = tuple(images_of(chat[0 if before is None else num_known :]))

        def said(answer: str) -> list[str]:
            return [*key, _comparable(spoken(answer, tools))]

        return await self._continue(before, ids, text, params, said, chat, pictures, hear)

    async def write_on(
        self, prompt: str | Sequence[int], params: Mapping[str, Any], hear: Hear | None = None
    ) -> list[Turn]:
        """Continue a text or token ids; earlier answers at their beginning keep the tokens that were sampled."""
        if not isinstance(prompt, str):
            asked = tuple(prompt)
            before = max(
                (turn for turn in self._turns if asked[: len(turn.token_ids)] == turn.token_ids),
                key=lambda turn: len(turn.token_ids),
                default=None,
            )
            ids = asked if before is None else asked[len(before.token_ids) :]
            with _encoding("prompt"):
                text = "" if before is None else self._tokenizer.decode(ids)
            return await self._continue(before, ids, text, params, lambda said: None, hear=hear)

        def grown(said: str) -> str | None:
            """Return the beginning of every prompt that continues the answer; None if the answer is empty."""
            return prompt + said if said else None

        before = self._longest(
            lambda said: isinstance(said, str) and prompt.startswith(said), len(prompt) + 1
        )
        if before is None:
            with _encoding("prompt"):
                whole = encode(prompt, lambda: self._tokenizer)
            return await self._continue(None, whole, "", params, grown, hear=hear)
        rest = prompt[len(before.said) :]
        # The tokens include the end of the answer, for example a stop string; the agent writes it again.
        decode, text = self._tokenizer.decode, before.completion.text
        there = decode(before.token_ids)[len(decode(before.completion.prompt_token_ids)) :]
        unread = rest.removeprefix(there[len(text) :]) if there.startswith(text) else rest
        added = encode_behind(self._tokenizer, text or before.said, unread)
        return await self._continue(before, added, rest, params, grown, hear=hear)

    def rollout(self, record: PromptRecord) -> Rollout:
        """Return the agent's rollout of a prompt, without answers that it did not read.

        The main row ends with the last answer; the other rows are its `branches`. Every token is trained on in only one
        row.

        Raises:
            RolloutError: The agent read no answer.
        """
        turns = [turn for turn in self._turns if turn.is_read]
        if not turns and self.is_full:
            raise RolloutError(
                f"the agent ended without an answer of the policy: its prompt has {self._num_refused} tokens, and the "
                f"model's length of {self.max_model_len} leaves no room for one (prompt {str(record.prompt)[:80]!r}). "
                "Shorten the prompt, or raise max_seq_len (engine.max_model_len where it is set)."
            )
        if not turns:
            raise RolloutError(
                "the agent ended without an answer of the policy: it must send a request. Correct the agent."
            )
        gone_on_from = {turn.before for turn in turns}
        rows: list[Rollout] = []
        trained: set[Turn] = set()
        for leaf in [turn for turn in reversed(turns) if turn not in gone_on_from]:
            rows.append(_row(leaf, record, trained))
        first, *others = rows
        if self.is_full:
            first = replace(first, finish_reason="length")
        return replace(first, branches=tuple(others))

    def _longest(self, begins: Callable[[Any], bool], shorter_than: int) -> Turn | None:
        """Return the longest turn that a request continues; among equally long turns the last one."""
        found = [turn for turn in self._turns if begins(turn.said) and len(turn.said) < shorter_than]
        return max(reversed(found), key=lambda turn: len(turn.said), default=None)

    async def _continue(
        self,
        before: Turn | None,
        ids: Sequence[int],
        text: str,
        params: Mapping[str, Any],
        said: Callable[[str], Any],
        chat: Sequence[Mapping[str, Any]] | None = None,
        pictures: tuple[Picture, ...] = (),
        hear: Hear | None = None,
    ) -> list[Turn]:
        path = [] if before is None else before.path
        prompt = [*(() if before is None else before.token_ids), *ids]
        num_tokens = len(prompt)
        if shown := [*(picture for turn in path for picture in turn.pictures), *pictures]:
            tokens, prompt = image_tokens_of(self._tokenizer), PicturedIds.of(prompt, shown)
            with _encoding("messages"):
                num_tokens = tokens.length(prompt, shown)
            if any(not tokens.reserved.isdisjoint(turn.completion.token_ids) for turn in path):
                # The engine would put a picture in the place of the token.
                self._parent.is_full, self._parent._num_refused = True, num_tokens
                raise RequestError(
                    "messages: an earlier answer has a token of images. Begin a new conversation."
                )
        if num_tokens >= self.max_model_len:
            self._parent.is_full, self._parent._num_refused = True, num_tokens
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens; the prompt has {num_tokens}.",
                code="context_length_exceeded",
            )
        goes_on = self._parent.is_full
        asked = self._params(params)
        number = self._count_request()
        if self._seed_of is not None:
            # vLLM uses seed + i for completion i. Rollouts of a group have consecutive first seeds, so a first request
            # for several completions uses the seed of a request that nobody makes.
            asked["seed"] = self._seed_of(number if number or asked["n"] == 1 else MAX_REQUESTS)
        if before is not None:
            before.is_read = True
        sampled = asyncio.run_coroutine_threadsafe(self._ask(prompt, asked, hear), self._loop)
        self._in_flight.add(sampled)
        try:
            answered = await asyncio.wrap_future(sampled)
            completions = [replace(answer, text=escaped_halves(answer.text)) for answer in answered]
            self._parent.refusal = ""
            # Reset only after an answer: of several concurrent requests, a refused one may end the agent.
            if goes_on:
                self._parent.is_full = False
        finally:
            self._in_flight.discard(sampled)
            self._parent._idle_since = time.monotonic()
        turns = [
            Turn(
                completion,
                before,
                tuple(ids),
                text,
                said(completion.text),
                chat_of(chat, completion.text),
                pictures,
            )
            for completion in completions
        ]
        self._turns += turns
        return turns

    def _params(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters of a request: the session's, and the ones that the agent may choose."""
        given = {name: value for name, value in asked.items() if value is not None}
        if self.is_free:
            return {**self._sampling, "logprobs": 0, "n": 1, **given}
        params = {**self._sampling, "logprobs": 0, "n": given.pop("n", 1)}
        for name, default in FOLLOWED.items():
            fixed = self._sampling.get(name, default)
            wanted = given.pop(name, fixed)
            if self._is_trained_on and wanted != fixed and {wanted, fixed} != {0, -1}:
                raise RequestError(
                    f"{name}={wanted}: the request must sample from the distribution that is trained, with {name}="
                    f"{fixed}. Leave it out, or change it for the whole run in sampling_params.",
                    name,
                )
        if self._sampling.get("structured_outputs"):
            ends = end_tokens(self._tokenizer) | set(self._sampling.get("stop_token_ids") or ())
            if not ends.issuperset(given.get("stop_token_ids") or ()):
                raise RequestError(
                    "stop_token_ids: they must be end tokens of the run, because of its grammar. Leave them out.",
                    "stop_token_ids",
                )
        limits = [
            limit for limit in (given.pop("max_tokens", None), params.get("max_tokens")) if limit is not None
        ]
        return {**params, "max_tokens": min(limits, default=None), **given}


def _row(leaf: Turn, record: PromptRecord, trained: set[Turn]) -> Rollout:
    """Return all turns up to `leaf` as one row; turns in `trained` are trained on in another row."""
    path = leaf.path
    row = Rollout.from_completion(record, path[0].completion, path[0].pictures)
    for turn in path[1:]:
        row = row.continued(turn.added, turn.added_text, turn.completion, turn.pictures)
    mask = list(row.policy_mask)
    start = len(row.prompt_token_ids)
    for turn in path:
        if turn in trained:
            end = len(turn.token_ids) - start
            mask[end - len(turn.completion.token_ids) : end] = [False] * len(turn.completion.token_ids)
    trained.update(path)
    row = replace(row, policy_mask=tuple(mask), messages=leaf.chat)
    if leaf.chat is None:
        return row
    # The agent may have written the beginning of the last answer, and whole answers.
    *before, last = [len(turn.chat) - 1 for turn in path if turn.chat is not None]
    contents = [(place, leaf.chat[place]["content"]) for place in before]
    return replace(row, policy_contents=[*contents, (last, leaf.completion.text)])


@contextmanager
def _encoding(param: str) -> Iterator[None]:
    """Turn an error of a chat template or tokenizer into a `RequestError`."""
    try:
        yield
    except (RequestError, VectorLMError):
        raise
    except Exception as error:  # A template may raise anything.
        raise RequestError(f"{param} cannot be encoded: {type(error).__name__}: {error}", param) from error


def _for_template(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    try:
        (plain,) = with_content([plain_message(message)])
        return {"content": "", **plain}
    except ValueError as error:
        raise RequestError(f"messages[{index}]: {error}", f"messages[{index}]") from None


def _comparable(message: Mapping[str, Any]) -> str:
    """Return a key that is equal for all forms of a message: frameworks add fields, and strip answers."""
    is_answer = message["role"] == "assistant"
    calls = [
        (call["function"].get("name"), call["function"].get("arguments"))
        for call in message.get("tool_calls", ())
    ]
    content = message["content"].strip() if is_answer else message["content"]
    return json.dumps([message["role"], content, calls], sort_keys=True)


def spoken(text: str, tools: Sequence[Any] | None) -> dict[str, Any]:
    """Return the policy's text as a message with its calls of the given tools."""
    functions = [tool.get("function") for tool in tools or ()]
    names = [str(function.get("name")) for function in functions if isinstance(function, Mapping)]
    content, calls = parse_calls(text, names) if tools else (text, [])
    if any(call.error for call in calls):
        content, calls = text, []
    return message_of(content, calls)
