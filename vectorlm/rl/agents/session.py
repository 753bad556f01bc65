"""One rollout as an agent makes it: its requests, the tokens of each, and which goes on from which."""

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

from vectorlm.data.encoding import chat_of, encode, encode_reply, end_tokens, escaped_halves, plain_message
from vectorlm.errors import RolloutError, VectorLMError
from vectorlm.rl.environments.tools import message_of, parse_calls
from vectorlm.rl.rollout import Rollout
from vectorlm.rl.rollouts.sampler import Ask
from vectorlm.sampling.handle import Hear
from vectorlm.types import Completion, PromptRecord

FOLLOWED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""What the trainer computes log-probabilities with, and what it is where nothing says otherwise."""
MAX_REQUESTS = 1000
"""Requests of a session: an agent that asks on and on would never end."""


class RequestError(Exception):
    """A request that cannot be answered; `param` is its field, `status` the HTTP status."""

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
    """The turn that it goes on from."""
    added: tuple[int, ...]
    """The tokens between the two, which the policy did not choose."""
    added_text: str
    said: Any
    """What a request that goes on from here begins with: messages with tools, or a text."""
    chat: Sequence[Mapping[str, Any]] | None = None
    """All messages up to its end."""
    is_read: bool = False
    """Whether the agent has got it: what nobody has read has earned no reward."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens up to its end."""
        return self.completion.prompt_token_ids + self.completion.token_ids


class Session:
    """The requests of one rollout; made on the event loop that samples, used on the gateway's."""

    def __init__(
        self,
        ask: Ask,
        tokenizer: Any,
        *,
        sampling: Mapping[str, Any],
        max_model_len: int,
        seed_of: Callable[[int], int] | None = None,
        is_trained_on: bool = True,
    ) -> None:
        """Sample with `ask` and the parameters `sampling`; `seed_of` draws the seed of a request by its number.

        Unless it `is_trained_on`, `sampling` takes the place of the parameters that a request has.
        """
        self.key = secrets.token_urlsafe(32)
        """Who holds it makes this session's requests."""
        self._ask, self._loop, self._tokenizer = ask, asyncio.get_running_loop(), tokenizer
        self._sampling, self._seed_of, self.max_model_len = sampling, seed_of, max_model_len
        self._is_trained_on = is_trained_on
        self._turns: list[Turn] = []
        self._num_requests = 0
        self.refusal = ""
        """Why the last request was refused; "" if it was answered."""
        self._in_flight: set[Future[Sequence[Completion]]] = set()
        self._idle_since = math.inf
        self.is_full = False
        """Whether a request was refused because the model has no room for it, and no later one was answered."""
        self._num_refused = 0
        """Tokens of the prompt that was refused last."""

    @property
    def idle_s(self) -> float:
        """Seconds since the agent began or got its last answer; at most 0 while it waits for one."""
        return 0.0 if self._in_flight else time.monotonic() - self._idle_since

    def begin(self) -> None:
        """Take note that the agent has begun."""
        self._idle_since = time.monotonic()

    def close(self) -> None:
        """Take back what has not been answered."""
        for sampled in list(self._in_flight):
            sampled.cancel()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        params: Mapping[str, Any],
        hear: Hear | None = None,
    ) -> list[Turn]:
        """Answer chat messages; of an earlier answer among them, the tokens are taken as they were sampled.

        Of a single answer `hear` gets what is sampled as it is sampled, in another thread.
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
        return await self._continue(
            before, ids, text, params, lambda said: [*key, _comparable(spoken(said, tools))], chat, hear=hear
        )

    async def write_on(
        self, prompt: str | Sequence[int], params: Mapping[str, Any], hear: Hear | None = None
    ) -> list[Turn]:
        """Continue a text or token ids; what earlier requests made of their beginning stays as it was sampled."""
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
            """Return what a longer prompt may begin with; after an empty answer the same prompt begins a new chat."""
            return prompt + said if said else None

        before = self._longest(
            lambda said: isinstance(said, str) and prompt.startswith(said), len(prompt) + 1
        )
        if before is None:
            with _encoding("prompt"):
                whole = encode(prompt, lambda: self._tokenizer)
            return await self._continue(None, whole, "", params, grown, hear=hear)
        rest = prompt[len(before.said) :]
        # The tokens hold what ended the answer, a stop string for example; the agent writes that itself.
        decode, text = self._tokenizer.decode, before.completion.text
        there = decode(before.token_ids)[len(decode(before.completion.prompt_token_ids)) :]
        unread = rest.removeprefix(there[len(text) :]) if there.startswith(text) else rest
        ids = self._tokenizer.encode(unread, add_special_tokens=False)
        return await self._continue(before, ids, rest, params, grown, hear=hear)

    def rollout(self, record: PromptRecord) -> Rollout:
        """Return the rollout that the agent has made of a prompt; what it did not read is left out.

        The row with the last answer comes first, the others are its `branches`; each token is trained on in one row.

        Raises:
            RolloutError: The agent has read no answer.
        """
        turns = [turn for turn in self._turns if turn.is_read]
        if not turns and self.is_full:
            raise RolloutError(
                f"the agent ended without an answer of the policy: its prompt has {self._num_refused} tokens, and the "
                f"model's length of {self.max_model_len} leaves no room for one (prompt {str(record.prompt)[:80]!r}). "
                "Shorten the prompt, or raise max_seq_len (sampler.engine.engine_args.max_model_len where it is set)."
            )
        if not turns:
            raise RolloutError("the agent ended without an answer of the policy: it must ask for one.")
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
        """Return the turn that a request goes on from: of equal ones the last."""
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
        hear: Hear | None = None,
    ) -> list[Turn]:
        prompt = [*(() if before is None else before.token_ids), *ids]
        if len(prompt) >= self.max_model_len:
            self.is_full, self._num_refused = True, len(prompt)
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens; the prompt has {len(prompt)}.",
                code="context_length_exceeded",
            )
        goes_on = self.is_full
        asked = self._params(params)
        if self._num_requests == MAX_REQUESTS:
            raise RequestError(f"This session has made its {MAX_REQUESTS} requests.", status=429)
        if self._seed_of is not None:
            asked["seed"] = self._seed_of(self._num_requests)
        self._num_requests += 1
        if before is not None:
            before.is_read = True
        sampled = asyncio.run_coroutine_threadsafe(self._ask(prompt, asked, hear), self._loop)
        self._in_flight.add(sampled)
        try:
            answered = await asyncio.wrap_future(sampled)
            completions = [replace(each, text=escaped_halves(each.text)) for each in answered]
            self.refusal = ""
            # Answered, and not only asked: it may be one of several at once, of which a refused one ends the agent.
            if goes_on:
                self.is_full = False
        finally:
            self._in_flight.discard(sampled)
            self._idle_since = time.monotonic()
        turns = [
            Turn(
                each,
                before,
                tuple(ids),
                text,
                said(each.text),
                chat_of(chat, each.text),
            )
            for each in completions
        ]
        self._turns += turns
        return turns

    def _params(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters of a request: the session's, with what the agent may choose."""
        given = {name: value for name, value in asked.items() if value is not None}
        params = {**self._sampling, "logprobs": 0, "n": given.pop("n", 1)}
        for name, default in FOLLOWED.items():
            fixed = self._sampling.get(name, default)
            wanted = given.pop(name, fixed)
            if self._is_trained_on and wanted != fixed and {wanted, fixed} != {0, -1}:
                raise RequestError(
                    f"{name}={wanted} would sample from another distribution than the one that is trained, whose "
                    f"{name} is {fixed}. Leave it out, or change it for the whole run in sampling_params.",
                    name,
                )
        if self._sampling.get("structured_outputs"):
            ends = end_tokens(self._tokenizer) | set(self._sampling.get("stop_token_ids") or ())
            if not ends.issuperset(given.get("stop_token_ids") or ()):
                raise RequestError(
                    "stop_token_ids would change which tokens the grammar of the run allows: use its end tokens.",
                    "stop_token_ids",
                )
        limits = [
            limit for limit in (given.pop("max_tokens", None), params.get("max_tokens")) if limit is not None
        ]
        return {**params, "max_tokens": min(limits, default=None), **given}


def _row(leaf: Turn, record: PromptRecord, trained: set[Turn]) -> Rollout:
    """Return all turns up to one, in a row; those in `trained` are trained on in another row."""
    path: list[Turn] = []
    turn: Turn | None = leaf
    while turn is not None:
        path.insert(0, turn)
        turn = turn.before
    row = Rollout.from_completion(record, path[0].completion)
    for turn in path[1:]:
        row = row.continued(turn.added, turn.added_text, turn.completion)
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
    # The agent may have begun the last answer, and written answers itself.
    *before, last = [len(turn.chat) - 1 for turn in path if turn.chat is not None]
    contents = [(place, leaf.chat[place]["content"]) for place in before]
    return replace(row, policy_contents=[*contents, (last, leaf.completion.text)])


@contextmanager
def _encoding(param: str) -> Iterator[None]:
    """Refuse what a chat template or a tokenizer does not take, with what it says of it."""
    try:
        yield
    except (RequestError, VectorLMError):
        raise
    except Exception as error:  # A template may raise whatever its author chose.
        raise RequestError(f"{param} cannot be encoded: {type(error).__name__}: {error}", param) from error


def _for_template(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    try:
        return {"content": "", **plain_message(message)}
    except ValueError as error:
        raise RequestError(f"messages[{index}]: {error}", f"messages[{index}]") from None


def _comparable(message: Mapping[str, Any]) -> str:
    """Return what two forms of the same message have in common: frameworks add fields, and strip answers."""
    is_answer = message["role"] == "assistant"
    calls = [
        (call["function"].get("name"), call["function"].get("arguments"))
        for call in message.get("tool_calls", ())
    ]
    content = message["content"].strip() if is_answer else message["content"]
    return json.dumps([message["role"], content, calls], sort_keys=True)


def spoken(text: str, tools: Sequence[Any] | None) -> dict[str, Any]:
    """Return what the policy wrote as a message, with the calls of tools that it may call."""
    functions = [tool.get("function") for tool in tools or ()]
    names = [str(each.get("name")) for each in functions if isinstance(each, Mapping)]
    content, calls = parse_calls(text, names) if tools else (text, [])
    if any(call.error for call in calls):
        content, calls = text, []
    return message_of(content, calls)
