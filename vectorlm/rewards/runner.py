"""Reward functions of every form, run over completions with a time limit."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from vectorlm.errors import RewardError
from vectorlm.plugin import TookTooLong, time_limit
from vectorlm.types import Completion, PromptRecord

BATCH_PARAMETER = "completions"
"""A function whose first parameter has this name takes a list of completions, and lists of everything else."""
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


def run_reward(
    reward: Callable[..., Any],
    items: Sequence[Scorable],
    timeout_s: float | None = None,
    stops_at_error: bool = False,
) -> list[RewardResult]:
    """Score completions with one function.

    The function gets the completion first, and by name whatever it asks for of ``prompt``, ``completion_ids`` and the
    prompt's columns; with ``**columns``, all of them. It returns a float, or None for a completion that cannot be
    scored. The calls of a coroutine function all run at once. If its first parameter is called ``completions`` it gets
    lists, and returns a list of the same length. One call may take `timeout_s` (see `vectorlm.plugin.time_limit`). With
    `stops_at_error` the first call that fails is the last: the others have no reward and no error.
    """
    if not items:
        return []
    if next(iter(inspect.signature(reward).parameters), "") == BATCH_PARAMETER:
        return _run_batch(reward, items, timeout_s)
    accepts = _accepts(reward)
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        together = partial(asyncio_run, _run_together(reward, items, accepts, timeout_s))
        # For a coroutine that waits without `await`.
        answer = _attempt(together, timeout_s and timeout_s + LOOP_GRACE_S)
        return [answer] * len(items) if isinstance(answer, RewardResult) else answer
    results: list[RewardResult] = []
    for item in items:
        results.append(_attempt(partial(_score, reward, item, accepts), timeout_s))
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


def _accepts(reward: Callable[..., Any]) -> Callable[[str], bool]:
    """Return what tells whether a function takes an argument by this name; its first is the completion."""
    parameters = inspect.signature(reward).parameters
    first = next(iter(parameters), "")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return lambda name: name != first and (takes_any or name in parameters)


def _arguments(item: Scorable, accepts: Callable[[str], bool]) -> dict[str, Any]:
    offered = {"prompt": item.prompt, "completion_ids": list(item.token_ids), **item.columns}
    return {name: value for name, value in offered.items() if accepts(name)}


def _score(reward: Callable[..., Any], item: Scorable, accepts: Callable[[str], bool]) -> RewardResult:
    return _to_result(reward(item.text, **_arguments(item, accepts)))


def _run_batch(
    reward: Callable[..., Any], items: Sequence[Scorable], timeout_s: float | None
) -> list[RewardResult]:
    accepts = _accepts(reward)
    names = dict.fromkeys(name for item in items for name in item.columns)
    columns = {
        "prompts": [item.prompt for item in items],
        "completion_ids": [list(item.token_ids) for item in items],
        **{name: [item.columns.get(name) for item in items] for name in names},
    }
    arguments = {name: values for name, values in columns.items() if accepts(name)}
    texts = [item.text for item in items]

    def call() -> list[Any]:
        answer = reward(texts, **arguments)
        found = list(asyncio_run(answer) if inspect.iscoroutine(answer) else answer)
        if len(found) != len(texts):
            raise ValueError(f"it returned {len(found)} rewards for {len(texts)} completions")
        return found

    answer = _attempt(call, timeout_s)
    if isinstance(answer, RewardResult):
        return [answer] * len(items)
    return [_attempt(partial(_to_result, value)) for value in answer]


async def _run_together(
    reward: Callable[..., Any],
    items: Sequence[Scorable],
    accepts: Callable[[str], bool],
    timeout_s: float | None,
) -> list[RewardResult]:
    async def one(item: Scorable) -> RewardResult:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return _to_result(await reward(item.text, **_arguments(item, accepts)))
        except Exception as error:
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
    except Exception as error:
        return _raised(error)


def _to_result(value: Any) -> RewardResult:
    if value is None:
        return RewardResult(math.nan)
    reward = float(value)
    if math.isinf(reward):
        return RewardResult(math.nan, f"it returned {reward}, which would make every baseline infinite")
    return RewardResult(reward)


def _raised(error: Exception) -> RewardResult:
    return RewardResult(math.nan, f"{type(error).__name__}: {error}")


def _late(timeout_s: float | None) -> RewardResult:
    return RewardResult(math.nan, f"no answer within {timeout_s:g} s")
