"""Calls of reward functions of every form, in the process that this runs in."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import operator
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import cloudpickle

from vectorlm.data.encoding import chat_of, is_messages, split_unfinished
from vectorlm.plugin import raised_at, text_of
from vectorlm.rl.rewards.registry import (
    COMPLETIONS,
    EXTRAS,
    IDS,
    LOG,
    PROMPTS,
    RESERVED,
    RewardSignature,
    get_reward,
)
from vectorlm.types import MAX_REWARD, RewardResult

Reward = str | bytes | Callable[..., Any]
"""A reward function: its name, its bytes by cloudpickle, or itself."""
Kind = Literal["lists", "together", "each"]


@dataclass(frozen=True)
class Scorable:
    """What a reward function is shown of one completion."""

    text: str
    """What the policy wrote, every turn on a new line."""
    prompt: Any
    token_ids: tuple[int, ...]
    """The tokens that the policy chose."""
    columns: Mapping[str, Any]
    """The other columns of the prompt's line."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The whole chat, the completion included; None if the prompt is none."""
    num_turns: int = 1
    """Turns of the policy."""
    environment: Mapping[str, float] = field(default_factory=dict)
    """What the environment measured."""
    policy_contents: Sequence[tuple[int, str]] = ()
    """The index in `messages` of every message of the policy, and its content without the environment's words."""

    def failure(self, error: str) -> str:
        """Return an error with what the function was shown."""
        return f"{error} (prompt {str(self.prompt)[:80]!r}, completion {self.text[:80]!r})"


def load_reward(reward: Reward) -> Callable[..., Any]:
    """Return the function itself."""
    if isinstance(reward, bytes):
        return _unpickled(reward)
    return get_reward(reward) if isinstance(reward, str) else reward


@cache
def _unpickled(reward: bytes) -> Callable[..., Any]:
    """Return the same object each time: it may keep a state."""
    function: Callable[..., Any] = cloudpickle.loads(reward)
    return function


def run_reward(
    reward: Reward,
    items: Sequence[Scorable],
    timeout_s: float | None = None,
    stops_at_error: bool = False,
) -> list[RewardResult]:
    """Score completions with one function, in this process.

    The function gets the completion in its parameter `completion`, or the first one, and by name whatever it asks for
    of ``prompt``, ``completion_ids`` and the prompt's columns; with ``**columns``, all of them. If it names
    ``log``, ``messages``, ``num_turns`` or ``environment``, it gets these too; a column of the name, but for ``log``,
    goes before. It returns a float, or None for a completion that cannot be scored. The calls of a coroutine function
    all run at once, each for `timeout_s` at most; nothing here ends a call of another function. If a parameter is
    called ``completions`` or ``prompts`` it gets lists by name, as TRL passes them, and returns a list of the same
    length; where a prompt is messages, its completion in such a list is messages too, those of all turns. A completion
    of several turns is what the policy wrote, every turn on a new line, without the environment's words. With
    `stops_at_error` the first call that fails is the last: the others have no reward and no error.
    """
    results: list[RewardResult] = []
    for part in scored(reward, items, timeout_s) if items else ():
        results += part
        if stops_at_error and any(each.error is not None for each in part):
            break
    return results + [RewardResult(math.nan)] * (len(items) - len(results))


def scored(
    reward: Reward, items: Sequence[Scorable], timeout_s: float | None
) -> Iterator[list[RewardResult]]:
    """Yield the results of each call, in the order of the items; first none, when the function is loaded."""
    function = load_reward(reward)
    yield []
    signature, kind = RewardSignature.of(function), kind_of(function)
    if kind == "lists":
        yield _run_lists(function, items, signature)
    elif kind == "together":
        yield asyncio_run(_run_together(function, items, signature, timeout_s))
    else:
        for item in items:
            yield [_score_one(function, item, signature)]


async def scored_together(
    reward: Reward, items: Sequence[Scorable], timeout_s: float | None
) -> AsyncIterator[list[RewardResult]]:
    """Do what `scored` does with a coroutine function, while the worker does so for others."""
    function = load_reward(reward)
    yield []
    yield await _run_together(function, items, RewardSignature.of(function), timeout_s)


def kind_of(reward: Callable[..., Any]) -> Kind:
    """Return how a function is called: for all completions as lists, for each one together with others, or alone."""
    if RewardSignature.of(reward).takes_lists:
        return "lists"
    is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
    return "together" if is_async else "each"


def describe(reward: Reward) -> Iterator[Kind]:
    """Yield the kind of a function; run by a worker."""
    yield kind_of(load_reward(reward))


def asyncio_run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, in another thread where this one has a running loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _offered(item: Scorable) -> dict[str, Any]:
    return {**_columns(item), "prompt": item.prompt, IDS[0]: list(item.token_ids)}


def _score_one(reward: Callable[..., Any], item: Scorable, signature: RewardSignature) -> RewardResult:
    logged: dict[str, Any] = {}
    result: RewardResult = _attempt(
        lambda: _to_result(signature.call(reward, _offered(item), _extras(item, logged), item.text))
    )
    return replace(result, logged={**result.logged, **logged})


def _extras(item: Scorable, logged: dict[str, Any]) -> dict[str, Any]:
    def log(name: str, value: Any) -> None:
        logged[str(name)] = _plain(value)

    extras = {name: getattr(item, name) for name in EXTRAS if name != LOG}
    return {**extras, LOG: log}


def _plain(value: Any) -> Any:
    """Return a number, or a text of anything else: it travels between processes."""
    if isinstance(value, bool | str) or value is None:
        return value
    try:
        return float(value)
    except Exception:  # The value's own class may raise whatever it likes.
        return str(value)


def _columns(item: Scorable) -> dict[str, Any]:
    return {name: value for name, value in item.columns.items() if name not in RESERVED}


def _run_lists(
    reward: Callable[..., Any], items: Sequence[Scorable], signature: RewardSignature
) -> list[RewardResult]:
    def in_list(item: Scorable) -> Any:
        if not is_messages(item.prompt):
            return item.text
        chat = item.messages or chat_of(item.prompt, item.text) or ()
        if own := dict(item.policy_contents):
            # An environment or an agent may have written messages of an assistant, too.
            return [
                {**each, "content": own[place]} if place in own else each
                for place, each in enumerate(chat)
                if place in own or (place > min(own) and each["role"] != "assistant")
            ]
        before, _ = split_unfinished(item.prompt)
        # An environment may have changed or added to what was asked, and an agent may have asked something else.
        is_same = itertools.takewhile(bool, map(operator.eq, before, chat))
        rest = chat[len(list(is_same)) :]
        return list(itertools.dropwhile(lambda each: each["role"] != "assistant", rest))

    columns = [_columns(item) for item in items]
    names = dict.fromkeys(name for each in columns for name in each)
    token_ids = [list(item.token_ids) for item in items]
    offered = {
        **{name: [each.get(name) for each in columns] for name in names},
        COMPLETIONS: [in_list(item) for item in items],
        PROMPTS: [item.prompt for item in items],
        **dict.fromkeys(IDS, token_ids),
    }

    logged: list[dict[str, Any]] = [{} for _ in items]

    def log(name: str, values: Any) -> None:
        per_item = (
            values
            if isinstance(values, list | tuple) and len(values) == len(items)
            else [values] * len(items)
        )
        for one, value in zip(logged, per_item, strict=True):
            one[str(name)] = _plain(value)

    extras = {name: [getattr(item, name) for item in items] for name in EXTRAS if name != LOG}

    def call() -> list[Any]:
        answer = signature.call(reward, offered, {**extras, LOG: log})
        answer = asyncio_run(answer) if inspect.iscoroutine(answer) else answer
        # A mapping would be read as its keys, and a text as its letters.
        if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
            raise TypeError(
                f"it returned {str(answer)[:40]!r}, a {type(answer).__name__}, and must return a list with one reward "
                f"per completion, of which there are {len(items)}"
            )
        found = list(answer)
        if len(found) != len(items):
            raise ValueError(
                f"it returned {len(found)} rewards for {len(items)} completions, and must return one reward per "
                "completion"
            )
        return found

    answer = _attempt(call)
    found = [answer] * len(items) if isinstance(answer, RewardResult) else list(map(_to_result, answer))
    first = next((index for index, result in enumerate(found) if result.error is not None), 0)
    return [
        replace(result, is_counted=index == first, logged={**result.logged, **logged[index]})
        for index, result in enumerate(found)
    ]


async def _run_together(
    reward: Callable[..., Any],
    items: Sequence[Scorable],
    signature: RewardSignature,
    timeout_s: float | None,
) -> list[RewardResult]:
    async def one(item: Scorable) -> RewardResult:
        logged: dict[str, Any] = {}
        extras = _extras(item, logged)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                value = await signature.call(reward, _offered(item), extras, item.text)
            result = _to_result(value)
            return replace(result, logged={**result.logged, **logged})
        except (Exception, SystemExit) as error:
            # A TimeoutError may also come from the function itself, or from a server that it asked.
            text = f"no answer within {timeout_s:g} s" if limit.expired() else raised_at(error)
            return RewardResult(math.nan, text)

    return await asyncio.gather(*map(one, items))


def _attempt(call: Callable[[], Any]) -> Any:
    """Return what the call returned, or a `RewardResult` with its error."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # What a model has written may call exit().
        return RewardResult(math.nan, raised_at(error))


def _to_result(value: Any) -> RewardResult:
    if value is None:
        return RewardResult(math.nan)
    if isinstance(value, Mapping) and "score" in value:
        # As verl's functions return it, with numbers to log.
        others = {str(name): _plain(each) for name, each in value.items() if name != "score"}
        return replace(_to_result(value["score"]), logged=others)
    try:
        # "nan" would pass for a completion that cannot be scored.
        if isinstance(value, str | bytes):
            raise TypeError
        reward = float(value)
    except Exception as error:  # The value's own class may raise whatever it likes.
        return RewardResult(
            math.nan,
            f"{type(error).__name__}: it returned {text_of(value)[:40]!r}, a {type(value).__name__}, and one reward "
            "per completion must be a number, a mapping with a number `score`, or None",
        )
    if not abs(reward) <= MAX_REWARD:
        rule = "must be finite in float32, or None where a completion cannot be scored"
        return RewardResult(math.nan, f"it returned {reward}, and rewards {rule}")
    return RewardResult(reward)
