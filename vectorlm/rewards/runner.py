"""Reward functions of every form, run over completions with a time limit."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vectorlm.encoding import is_messages
from vectorlm.errors import RewardError
from vectorlm.plugin import TookTooLong, time_limit
from vectorlm.rewards.signature import COMPLETIONS, IDS, PROMPTS, RESERVED, RewardSignature
from vectorlm.types import Completion, PromptRecord

MAX_REWARD = 3.4e38
"""The largest number in float32, about."""
LOOP_GRACE_S = 1.0
"""What all coroutines together may take beyond the limit of each, which ends them one by one."""


@dataclass(frozen=True)
class Scorable:
    """What a reward function is shown of one completion."""

    text: str
    """The completion, without its prompt."""
    prompt: Any
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]
    """The other columns of the prompt's line."""


@dataclass(frozen=True)
class RewardResult:
    """What one reward function returned for one completion."""

    reward: float
    """NaN where the completion could not be scored: the function returned None, raised or ran out of time."""
    error: str | None = None
    is_counted: bool = True
    """Whether the error stands for the call: one call with lists may fail for many completions."""


def run_reward(
    reward: Callable[..., Any],
    items: Sequence[Scorable],
    timeout_s: float | None = None,
    stops_at_error: bool = False,
) -> list[RewardResult]:
    """Score completions with one function.

    The function gets the completion in its parameter `completion`, or the first one, and by name whatever it asks for
    of ``prompt``, ``completion_ids`` and the prompt's columns; with ``**columns``, all of them. It returns a float, or
    None for a completion that cannot be scored. The calls of a coroutine function all run at once. If a parameter is
    called ``completions`` or ``prompts`` it gets lists by name, as TRL passes them, and returns a list of the same
    length; where a prompt is messages, its completion in such a list is messages too. One call may take `timeout_s`
    (see `vectorlm.plugin.time_limit`). With `stops_at_error` the first call that fails is the last: the others have no
    reward and no error.
    """
    if not items:
        return []
    signature = RewardSignature.of(reward)
    if signature.takes_lists:
        return _run_lists(reward, items, signature, timeout_s)
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        together = partial(asyncio_run, _run_together(reward, items, signature, timeout_s))
        # For a coroutine that waits without `await`.
        answer = _attempt(together, timeout_s and timeout_s + LOOP_GRACE_S)
        return [answer] * len(items) if isinstance(answer, RewardResult) else answer

    def score(item: Scorable) -> RewardResult:
        return _to_result(signature.call(reward, _offered(item), item.text))

    results: list[RewardResult] = []
    for item in items:
        results.append(_attempt(partial(score, item), timeout_s))
        if stops_at_error and results[-1].error is not None:
            break
    return results + [RewardResult(math.nan)] * (len(items) - len(results))


def score_answers(
    reward: Callable[..., Any],
    prompt_records: Sequence[PromptRecord],
    answers: Sequence[Sequence[Completion]],
    *,
    timeout_s: float | None,
    setting: str,
) -> list[list[float]]:
    """Return the reward of each answer to each prompt; NaN for an answer that the function returns None for.

    Raises:
        RewardError: The function raised or took longer than `timeout_s`; the text begins with `setting`.
    """
    items = [
        Scorable(completion.text, record.prompt, completion.token_ids, record.columns)
        for record, options in zip(prompt_records, answers, strict=True)
        for completion in options
    ]
    results = run_reward(reward, items, timeout_s, stops_at_error=True)
    for item, result in zip(items, results, strict=True):
        if result.error is not None:
            raise RewardError(
                f"{setting} failed: {result.error} (prompt {str(item.prompt)[:80]!r}, completion "
                f"{item.text[:80]!r}). Correct the function."
            )
    rewards = iter(result.reward for result in results)
    return [[next(rewards) for _ in options] for options in answers]


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


def _columns(item: Scorable) -> dict[str, Any]:
    return {name: value for name, value in item.columns.items() if name not in RESERVED}


def _run_lists(
    reward: Callable[..., Any], items: Sequence[Scorable], signature: RewardSignature, timeout_s: float | None
) -> list[RewardResult]:
    def in_list(item: Scorable) -> Any:
        return [{"role": "assistant", "content": item.text}] if is_messages(item.prompt) else item.text

    columns = [_columns(item) for item in items]
    names = dict.fromkeys(name for each in columns for name in each)
    token_ids = [list(item.token_ids) for item in items]
    offered = {
        **{name: [each.get(name) for each in columns] for name in names},
        COMPLETIONS: [in_list(item) for item in items],
        PROMPTS: [item.prompt for item in items],
        **dict.fromkeys(IDS, token_ids),
    }

    def call() -> list[Any]:
        answer = signature.call(reward, offered)
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

    answer = _attempt(call, timeout_s)
    found = [answer] * len(items) if isinstance(answer, RewardResult) else list(map(_to_result, answer))
    first = next((index for index, result in enumerate(found) if result.error is not None), 0)
    return [replace(result, is_counted=index == first) for index, result in enumerate(found)]


async def _run_together(
    reward: Callable[..., Any],
    items: Sequence[Scorable],
    signature: RewardSignature,
    timeout_s: float | None,
) -> list[RewardResult]:
    async def one(item: Scorable) -> RewardResult:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return _to_result(await signature.call(reward, _offered(item), item.text))
        except (Exception, SystemExit) as error:
            # A TimeoutError may also come from the function itself, or from a server that it asked.
            return _late(timeout_s) if limit.expired() else _raised(error)

    return await asyncio.gather(*map(one, items))


def _attempt(call: Callable[[], Any], timeout_s: float | None = None) -> Any:
    """Return what the call returned, or a `RewardResult` with its error."""
    try:
        with time_limit(timeout_s):
            return call()
    except TookTooLong:
        return _late(timeout_s)
    except (Exception, SystemExit) as error:  # What a model has written may call exit().
        return _raised(error)


def _to_result(value: Any) -> RewardResult:
    if value is None:
        return RewardResult(math.nan)
    try:
        reward = float(value)
    except Exception as error:  # The value's own class may raise whatever it likes.
        return RewardResult(
            math.nan,
            f"{type(error).__name__}: it returned {str(value)[:40]!r}, a {type(value).__name__}, and one reward per "
            "completion must be a number, or None",
        )
    if abs(reward) > MAX_REWARD:
        return RewardResult(math.nan, f"it returned {reward}, and rewards must be finite in float32")
    return RewardResult(reward)


def _raised(error: BaseException) -> RewardResult:
    return RewardResult(math.nan, f"{type(error).__name__}: {error}")


def _late(timeout_s: float | None) -> RewardResult:
    return RewardResult(math.nan, f"no answer within {timeout_s:g} s")
