"""Call reward functions of every form in this process."""

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
"""A reward function, its name, or its bytes from cloudpickle."""
Kind = Literal["lists", "together", "each"]


@dataclass(frozen=True)
class Scorable:
    """One completion as reward functions see it."""

    text: str
    """The policy's text, every turn on a new line."""
    prompt: Any
    token_ids: tuple[int, ...]
    """The tokens that the policy chose."""
    columns: Mapping[str, Any]
    """The other columns of the prompt's row."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The whole chat with the completion; None if the prompt is not a chat."""
    num_turns: int = 1
    """Number of turns of the policy."""
    environment: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the environment."""
    policy_contents: Sequence[tuple[int, str]] = ()
    """Index in `messages` of every message of the policy, and its content without the environment's text."""

    def failure(self, error: str) -> str:
        """Return an error with the prompt and completion of the call."""
        return f"{error} (prompt {str(self.prompt)[:80]!r}, completion {self.text[:80]!r})"


def load_reward(reward: Reward) -> Callable[..., Any]:
    """Return the function from any of its forms."""
    if isinstance(reward, bytes):
        return _unpickled(reward)
    return get_reward(reward) if isinstance(reward, str) else reward


@cache
def _unpickled(reward: bytes) -> Callable[..., Any]:
    """Return the same object every time, because it may have a state."""
    function: Callable[..., Any] = cloudpickle.loads(reward)
    return function


def run_reward(
    reward: Reward,
    items: Sequence[Scorable],
    timeout_s: float | None = None,
    stops_at_error: bool = False,
) -> list[RewardResult]:
    """Score completions with one function, in this process.

    The function gets the completion in its parameter `completion`, or in the first one. Parameters named ``prompt``,
    ``completion_ids`` or like a column of the prompt are passed by name; ``**columns`` receives all of them.
    Parameters named ``log``, ``messages``, ``num_turns`` and ``environment`` are passed too, unless a column has that
    name; ``log`` is always the logging function. The reward function returns a float, or None for a completion that
    cannot be scored.

    A function with a parameter ``completions`` or ``prompts`` gets lists by name, as in TRL, and returns a list of
    the same length. If a prompt is messages, its completion in the list is the messages of all turns. Otherwise a
    completion of several turns is the policy's text, every turn on a new line, without the environment's text.

    The calls of a coroutine function run concurrently, each for at most `timeout_s`. Calls of other functions have no
    time limit here. With `stops_at_error`, no call follows a failed call: the remaining completions have neither
    reward nor error.
    """
    results: list[RewardResult] = []
    for part in scored(reward, items, timeout_s) if items else ():
        results += part
        if stops_at_error and any(result.error is not None for result in part):
            break
    return results + [RewardResult(math.nan)] * (len(items) - len(results))


def scored(
    reward: Reward, items: Sequence[Scorable], timeout_s: float | None
) -> Iterator[list[RewardResult]]:
    """Yield an empty list after the function is loaded; then the results of every call, in the order of the items."""
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
    """Yield the results of a coroutine function as `scored` does; other jobs run concurrently in the same worker."""
    function = load_reward(reward)
    yield []
    yield await _run_together(function, items, RewardSignature.of(function), timeout_s)


def kind_of(reward: Callable[..., Any]) -> Kind:
    """Return how to call a function: with lists, concurrently for every completion, or one call at a time."""
    if RewardSignature.of(reward).takes_lists:
        return "lists"
    is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
    return "together" if is_async else "each"


def describe(reward: Reward) -> Iterator[Kind]:
    """Yield the kind of a function; runs in a worker."""
    yield kind_of(load_reward(reward))


def asyncio_run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, in another thread if this thread has a running loop (in a notebook)."""
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
    """Return a plain value, or any other value as text, because it is sent to another process."""
    if isinstance(value, bool | str) or value is None:
        return value
    try:
        return float(value)
    except Exception:  # The value's class may raise anything.
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
            # An environment or an agent may also have written assistant messages.
            return [
                {**message, "content": own[place]} if place in own else message
                for place, message in enumerate(chat)
                if place in own or (place > min(own) and message["role"] != "assistant")
            ]
        before, _ = split_unfinished(item.prompt)
        # An environment may have changed the prompt, and an agent may have sent another one.
        is_same = itertools.takewhile(bool, map(operator.eq, before, chat))
        rest = chat[len(list(is_same)) :]
        return list(itertools.dropwhile(lambda message: message["role"] != "assistant", rest))

    columns = [_columns(item) for item in items]
    names = dict.fromkeys(name for row in columns for name in row)
    token_ids = [list(item.token_ids) for item in items]
    offered = {
        **{name: [row.get(name) for row in columns] for name in names},
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
        # list() would turn a mapping into its keys, and a text into its characters.
        if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
            raise TypeError(
                f"it returned {str(answer)[:40]!r}, a {type(answer).__name__}, but must return a list with one reward "
                f"for each of the {len(items)} completions"
            )
        found = list(answer)
        if len(found) != len(items):
            raise ValueError(
                f"it returned {len(found)} rewards for {len(items)} completions, but must return one reward per "
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
            # The function, or a client that it uses, may also raise TimeoutError.
            text = f"no answer within {timeout_s:g} s" if limit.expired() else raised_at(error)
            return RewardResult(math.nan, text)

    return await asyncio.gather(*map(one, items))


def _attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or a `RewardResult` with its error."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # The policy's text may call exit().
        return RewardResult(math.nan, raised_at(error))


def _to_result(value: Any) -> RewardResult:
    if value is None:
        return RewardResult(math.nan)
    if isinstance(value, Mapping) and "score" in value:
        # verl's functions return this form; the other numbers are logged.
        others = {str(name): _plain(number) for name, number in value.items() if name != "score"}
        return replace(_to_result(value["score"]), logged=others)
    try:
        # float("nan") would count as a completion that cannot be scored.
        if isinstance(value, str | bytes):
            raise TypeError
        reward = float(value)
    except Exception as error:  # The value's class may raise anything.
        return RewardResult(
            math.nan,
            f"{type(error).__name__}: it returned {text_of(value)[:40]!r}, a {type(value).__name__}, but a reward must "
            "be a number, a mapping with a number `score`, or None",
        )
    if not abs(reward) <= MAX_REWARD:
        rule = "must be finite in float32, or None if the completion cannot be scored"
        return RewardResult(math.nan, f"it returned {reward}, but a reward {rule}")
    return RewardResult(reward)
