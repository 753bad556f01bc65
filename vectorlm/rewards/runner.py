"""Reward functions of every form, run over completions with a time limit."""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BATCH_PARAMETER = "completions"
"""A function whose first parameter has this name takes a list of completions, and lists of everything else."""


@dataclass(frozen=True)
class Scorable:
    """What a reward function is shown of one completion."""

    text: str
    """The completion, without its prompt."""
    prompt: Any
    """What was asked."""
    token_ids: tuple[int, ...]
    """The completion's tokens."""
    columns: Mapping[str, Any]
    """The other columns of the question's line."""


@dataclass(frozen=True)
class Outcome:
    """What one reward function said of one completion."""

    reward: float
    """NaN where the completion could not be scored: the function returned None, raised or ran out of time."""
    error: str | None = None
    """Why, when the function raised or ran out of time."""


def run_reward(
    reward: Callable[..., Any], items: Sequence[Scorable], timeout_s: float | None = None
) -> list[Outcome]:
    """Score completions with one function.

    The function gets the completion first, and by name whatever it asks for of ``prompt``, ``completion_ids`` and the
    question's columns; with ``**columns``, all of them. It may be a coroutine function, all calls of which run at once.
    If its first parameter is called ``completions`` it gets lists, and returns a list of as many numbers.

    Args:
        reward: Returns a float, or None for a completion that cannot be scored.
        items: What to score.
        timeout_s: Seconds for one call, for a batch in one; None waits for ever.

    Returns:
        One outcome for each item, in their order. A call that runs out of time is left behind in its thread.
    """
    if not items:
        return []
    names = _accepted(reward)
    if _takes_batches(reward):
        return _run_batch(reward, items, names, timeout_s)
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        return asyncio_run(_run_together(reward, items, names, timeout_s))
    return _run_each([_call(reward, item, names) for item in items], timeout_s)


def asyncio_run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, in a thread of its own where this one has a running loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(asyncio.run(work)))
    thread.start()
    thread.join()
    return answers[0]


def _takes_batches(reward: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(reward).parameters), "") == BATCH_PARAMETER


@dataclass(frozen=True)
class _Accepted:
    """What a reward function can be given by name."""

    first: str
    """Its first parameter, which is the completion and is never given by name."""
    names: frozenset[str] | None
    """The others; None where it takes any."""

    def __contains__(self, name: str) -> bool:
        return name != self.first and (self.names is None or name in self.names)


def _accepted(reward: Callable[..., Any]) -> _Accepted:
    parameters = inspect.signature(reward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return _Accepted(next(iter(parameters), ""), None if takes_any else frozenset(parameters))


def _arguments(item: Scorable, names: _Accepted) -> dict[str, Any]:
    offered = {"prompt": item.prompt, "completion_ids": list(item.token_ids), **item.columns}
    return {name: value for name, value in offered.items() if name in names}


def _call(reward: Callable[..., Any], item: Scorable, names: _Accepted) -> Callable[[], Any]:
    return lambda: reward(item.text, **_arguments(item, names))


def _run_batch(
    reward: Callable[..., Any],
    items: Sequence[Scorable],
    names: _Accepted,
    timeout_s: float | None,
) -> list[Outcome]:
    of_any = dict.fromkeys(name for item in items for name in item.columns)
    columns = {
        "prompts": [item.prompt for item in items],
        "completion_ids": [list(item.token_ids) for item in items],
        **{name: [item.columns.get(name) for item in items] for name in of_any},
    }
    arguments = {name: values for name, values in columns.items() if name in names}
    texts = [item.text for item in items]

    def call() -> list[Any]:
        answer = reward(texts, **arguments)
        found = list(asyncio_run(answer) if inspect.iscoroutine(answer) else answer)
        if len(found) != len(texts):
            raise ValueError(f"it returned {len(found)} rewards for {len(texts)} completions")
        return found

    (answer,) = _run_each([call], timeout_s, convert=lambda found: found)
    if isinstance(answer, Outcome):
        return [answer] * len(items)
    return [_attempt(lambda value=value: value, _outcome_of) for value in answer]  # type: ignore[misc]


async def _run_together(
    reward: Callable[..., Any],
    items: Sequence[Scorable],
    names: _Accepted,
    timeout_s: float | None,
) -> list[Outcome]:
    async def one(item: Scorable) -> Outcome:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return _outcome_of(await reward(item.text, **_arguments(item, names)))
        except Exception as error:
            # A TimeoutError may also be the function's own, of a server that it asked.
            return _late(timeout_s) if limit.expired() else _raised(error)

    return await asyncio.gather(*map(one, items))


def _run_each(
    calls: Sequence[Callable[[], Any]],
    timeout_s: float | None,
    convert: Callable[[Any], Any] | None = None,
) -> list[Any]:
    """Make the calls one after the other; each answer, or the outcome of one that failed."""
    convert = convert or _outcome_of
    if timeout_s is None:
        return [_attempt(call, convert) for call in calls]
    answers: list[Any] = []
    while len(answers) < len(calls):
        # A call that hangs cannot be ended: its thread is left behind, and a new one takes the rest.
        rest = calls[len(answers) :]
        arrived: queue.SimpleQueue = queue.SimpleQueue()
        is_left = threading.Event()
        threading.Thread(target=_work, args=(rest, convert, arrived, is_left), daemon=True).start()
        for _ in rest:
            try:
                answers.append(arrived.get(timeout=timeout_s))
            except queue.Empty:
                answers.append(_late(timeout_s))
                is_left.set()
                break
    return answers


def _work(
    calls: Sequence[Callable[[], Any]],
    convert: Callable[[Any], Any],
    arrived: queue.SimpleQueue,
    is_left: threading.Event,
) -> None:
    for call in calls:
        if is_left.is_set():
            return
        arrived.put(_attempt(call, convert))


def _attempt(call: Callable[[], Any], convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(call())
    except Exception as error:
        return _raised(error)


def _outcome_of(value: Any) -> Outcome:
    if value is None:
        return Outcome(math.nan)
    reward = float(value)
    if math.isinf(reward):
        return Outcome(math.nan, f"it returned {reward}, which no baseline survives")
    return Outcome(reward)


def _raised(error: Exception) -> Outcome:
    return Outcome(math.nan, f"{type(error).__name__}: {error}")


def _late(timeout_s: float | None) -> Outcome:
    return Outcome(math.nan, f"no answer within {timeout_s} s")
