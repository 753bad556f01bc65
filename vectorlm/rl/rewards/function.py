"""Run a reward function in worker processes; a call that hangs or crashes loses only its own completion."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import cloudpickle

from vectorlm.data.encoding import chat_of
from vectorlm.errors import RewardError, WorkerLost
from vectorlm.ranks.workers.pool import Worker, WorkerPool, together
from vectorlm.rl.rewards.runner import Kind, Reward, Scorable, run_reward
from vectorlm.types import RewardResult

if TYPE_CHECKING:
    # This imports torch, which checking a config does not need.
    from vectorlm.rl.rollout import Rollout

RUNNER = "vectorlm.rl.rewards.runner"
GRACE_S = 1.0
"""Seconds after the time limit until a worker of coroutines is ended; the coroutines normally time out before."""
CHUNKS_PER_WORKER, MIN_CHUNK = 4, 4


class RewardFunction:
    """A reward function with its workers and time limit; see `vectorlm.rl.rewards.runner.run_reward` for its forms."""

    def __init__(
        self,
        reward: Reward,
        pool: WorkerPool | None = None,
        *,
        timeout_s: float | None = None,
        stops_at_error: bool = False,
        right_from: float | None = None,
    ) -> None:
        """Take a function or its name; `right_from` is the lowest reward of a correct answer, None for exactly 1.

        Without a `pool` the function runs in this process, and a call that hangs never times out.
        """
        self._right_from = right_from
        self._pool, self._timeout_s, self.stops_at_error = pool, timeout_s, stops_at_error
        is_sent = pool is not None and not isinstance(reward, str)
        self._reward: Reward = cloudpickle.dumps(reward) if is_sent else reward
        self._where = f" ({reward})" if isinstance(reward, str) else ""
        self._kind: Kind | None = None
        self._shared: asyncio.Task[Worker] | None = None

    def score(self, items: Sequence[Scorable]) -> list[RewardResult]:
        """Score completions; with `stops_at_error`, completions after a failed call have neither reward nor error.

        Raises:
            ConfigError: The function cannot be imported.
            WorkersDied: The worker processes crash again and again.
        """
        if self._pool is None:
            found = run_reward(self._reward, items, self._timeout_s, self.stops_at_error)
        else:
            found = self._pool.submit(self._score(items, shares=False)).result() if items else []
        return [replace(result, right_from=self._right_from) for result in found]

    async def score_alone(self, items: Sequence[Scorable]) -> list[RewardResult] | None:
        """Score one of many groups, on the pool's event loop; return None for a function of lists.

        A function of lists may compare groups, and needs them together. Coroutines of all groups run concurrently in
        one worker.
        """
        self._kind = self._kind or await self._ask_kind()
        return None if self._kind == "lists" else await self._score(items, shares=self._kind == "together")

    async def _score(self, items: Sequence[Scorable], shares: bool) -> list[RewardResult]:
        self._kind = self._kind or await self._ask_kind()
        assert self._pool is not None
        scoring = _Scoring(items)
        size = len(items)
        if self._kind == "each":
            # For a small group, one message per completion would cost more than most functions.
            share = math.ceil(size / self._pool.size)
            size = max(math.ceil(share / CHUNKS_PER_WORKER), min(share, MIN_CHUNK))
        places = range(len(items))
        with contextlib.suppress(_Stopped):
            await together(
                self._score_chunk(scoring, places[start : start + size], shares) for start in places[::size]
            )
        return [scoring.results.get(place, RewardResult(math.nan)) for place in places]

    async def _ask_kind(self) -> Kind:
        """Ask a worker for the kind: this process must not import the user's file."""
        assert self._pool is not None
        while True:
            with contextlib.suppress(WorkerLost):
                async with self._pool.worker() as worker:
                    kind: Kind = await worker.ask(f"{RUNNER}:describe", self._reward)
                    return kind

    @contextlib.asynccontextmanager
    async def _worker(self, shares: bool) -> AsyncIterator[Worker]:
        assert self._pool is not None
        if not shares:
            async with self._pool.worker() as worker:
                yield worker
            return
        if self._shared is None or (self._shared.done() and self._shared.result().loss is not None):
            self._shared = asyncio.create_task(self._pool.start_shared())
        yield await asyncio.shield(self._shared)

    async def _score_chunk(self, scoring: _Scoring, places: Sequence[int], shares: bool) -> None:
        """Score the completions at some indices; another worker continues after a time-out or crash."""
        runs_together = self._kind == "together"
        limit_s = self._timeout_s and self._timeout_s + (GRACE_S if runs_together else 0.0)
        missing = list(places)
        while missing:
            items = [scoring.items[place] for place in missing]
            try:
                async with self._worker(shares) as worker:
                    function = f"{RUNNER}:{'scored_together' if shares else 'scored'}"
                    work = worker.run(function, self._reward, items, self._timeout_s, limit_s=limit_s)
                    async for part in work:
                        for result in part:
                            self._note(scoring, missing.pop(0), result)
            except WorkerLost as loss:
                if shares or (runs_together and len(missing) > 1):
                    # Call each completion by itself, to find the calls that fail.
                    await together(self._score_chunk(scoring, [place], shares=False) for place in missing)
                    return
                for index in range(1 if self._kind == "each" else len(missing)):
                    error = RewardResult(math.nan, f"{loss}{self._where}", is_counted=index == 0)
                    self._note(scoring, missing.pop(0), error)

    def _note(self, scoring: _Scoring, place: int, result: RewardResult) -> None:
        scoring.results[place] = result
        if self.stops_at_error and result.error is not None:
            raise _Stopped


@dataclass
class _Scoring:
    items: Sequence[Scorable]
    results: dict[int, RewardResult] = field(default_factory=dict)
    """Results by index in `items`."""


class _Stopped(Exception):
    """An exception that stops scoring after a failed call."""


def shown(rollout: Rollout) -> Scorable:
    """Return a rollout as reward functions see it."""
    record = rollout.prompt_record
    text, messages = rollout.policy_text, rollout.messages
    return Scorable(
        text,
        record.prompt,
        rollout.policy_token_ids,
        record.columns,
        chat_of(record.prompt, text) if messages is None else messages,
        rollout.num_turns,
        rollout.measured,
        rollout.policy_contents,
    )


def score_answers(
    reward: RewardFunction | None, answers: Sequence[Sequence[Rollout]], name: str
) -> list[list[RewardResult]]:
    """Score the answers to each prompt; without a function, return the rewards from their environments.

    Raises:
        RewardError: A function with `stops_at_error` raised or timed out; the message begins with `name`.
    """
    if reward is None:
        return [
            [RewardResult(math.fsum(answer.turn_rewards), logged=answer.measured) for answer in options]
            for options in answers
        ]
    items = [shown(answer) for options in answers for answer in options]
    results = reward.score(items)
    for item, result in zip(items, results, strict=True):
        if result.error is not None and reward.stops_at_error:
            raise RewardError(f"{name} failed: {item.failure(result.error)}. Correct the function.")
    found = iter(results)
    return [[next(found) for _ in options] for options in answers]
