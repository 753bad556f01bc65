"""The group of rollouts of one prompt, as a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from vectorlm.encoding import asked
from vectorlm.errors import RolloutError
from vectorlm.rl.rollout import Rollout
from vectorlm.rl.settings import CollectSettings
from vectorlm.types import Completion, Prompt, PromptRecord

Result = TypeVar("Result")


class Environment(Protocol):
    """What one rollout talks to: a tool, a game, a user. Each rollout has an object of its own, beside its engine."""

    def respond(self, text: str) -> str | None:
        """Return what the policy reads next, or None to end the rollout.

        Args:
            text: What the policy wrote in this turn.
        """
        ...


MakeEnvironment = Callable[..., Environment]
"""``make(**columns)`` for each rollout, with the columns of its prompt."""
Ask = Callable[[Prompt, dict[str, Any]], Awaitable[Sequence[Completion]]]
"""Asks the engine for the completions of a prompt."""


@dataclass(frozen=True)
class Task:
    """A group to be sampled."""

    position: int
    """The position of its prompt among all prompts of the run."""
    prompt_record: PromptRecord
    stored: Sequence[Rollout] | None = None
    """The rollouts of a stored group, whose position is among these; only its greedy completion is sampled."""


@dataclass(frozen=True)
class SampledGroup:
    """The rollouts of one prompt."""

    rollouts: Sequence[Rollout]
    greedy: Rollout | None = None
    """A greedy completion, where the algorithm needs one."""


@dataclass(frozen=True, kw_only=True)
class GroupSampler:
    """Samples groups as the settings say."""

    settings: CollectSettings
    seed: int
    """With the position of a prompt and the turn, this decides what is sampled, whatever is sampled beside it."""
    max_model_len: int
    """Longest prompt and completion together, in tokens."""
    encode: Callable[[str], list[int]]
    """Turns an environment's reply into tokens, without special ones."""
    make_environment: MakeEnvironment | None = None
    """None for single turns."""
    needs_greedy: bool = False
    """Sample a greedy completion of each prompt too."""

    async def sample(self, task: Task, ask: Ask) -> SampledGroup:
        """Return the group.

        Raises:
            RolloutError: An environment failed.
        """
        if not self.needs_greedy:
            return SampledGroup(await self._group(task, ask))
        params = {**self._params, "n": 1, "temperature": 0.0}
        greedy = ask(asked(task.prompt_record), params)
        rollouts, (completion,) = await asyncio.gather(self._group(task, ask), greedy)
        return SampledGroup(rollouts, Rollout.begun(task.prompt_record, completion))

    async def _group(self, task: Task, ask: Ask) -> Sequence[Rollout]:
        if task.stored is not None:
            return task.stored
        size, record = self.settings.group_size, task.prompt_record
        params = {**self._params, "n": size, "seed": self._draw_seed(task.position)}
        begun = [Rollout.begun(record, each) for each in await ask(asked(record), params)]
        if self.make_environment is None:
            return begun
        turns = (self._go_on(task, index, rollout, ask) for index, rollout in enumerate(begun))
        return await asyncio.gather(*turns)

    async def _go_on(self, task: Task, index: int, rollout: Rollout, ask: Ask) -> Rollout:
        """Take further turns after the first."""
        environment, written = None, rollout.text
        # A truncated turn has not finished what it began to write.
        while rollout.num_turns < self.settings.max_turns and not rollout.is_truncated:
            environment, reply = await self._respond(environment, rollout, written)
            ids = () if reply is None else tuple(self.encode(reply))
            prompt = [*rollout.prompt_token_ids, *rollout.token_ids, *ids]
            if reply is None or len(prompt) >= self.max_model_len:
                break
            seed = self._draw_seed(task.position, rollout.num_turns, index)
            (completion,) = await ask(prompt, {**self._params, "n": 1, "seed": seed})
            rollout, written = rollout.continued(ids, reply, completion), completion.text
        return rollout

    async def _respond(
        self, environment: Environment | None, rollout: Rollout, written: str
    ) -> tuple[Environment, str | None]:
        """Return the environment, made if there is none, and what it replies; both are code of the user's."""

        def respond() -> tuple[Environment, str | None]:
            assert self.make_environment is not None
            made = environment or self.make_environment(**rollout.prompt_record.columns)
            return made, made.respond(written)

        limit_s = self.settings.environment_timeout_s
        try:
            return await asyncio.wait_for(in_thread(respond), limit_s)
        except TimeoutError:
            what = f"no answer within {limit_s:g} s"
        except UserCodeFailed as error:
            what = str(error)
        raise RolloutError(
            f"the environment failed: {what} (prompt {str(rollout.prompt_record.prompt)[:80]!r}, turn "
            f"{rollout.num_turns}, after {written[:80]!r}). Catch the error in respond(), and return a text or None "
            "instead."
        )

    @property
    def _params(self) -> dict[str, Any]:
        """The sampling parameters of every rollout; `n` and `seed` are added for each."""
        # The sampled tokens' own log-probabilities cost next to nothing.
        return {"logprobs": 0, **self.settings.sampling}

    def _draw_seed(self, *place: int) -> int:
        """Draw the seed of a request: the engine's own random state would not survive a restart."""
        return int(np.random.default_rng((self.seed, *place)).integers(0, 2**62))


class UserCodeFailed(Exception):
    """Code of the user's raised; the text is the error's type and text."""


async def in_thread(call: Callable[[], Result]) -> Result:
    """Return what `call` returns, from a daemon thread of its own: one that hangs keeps no process from its end.

    Raises:
        UserCodeFailed: It raised, or called ``exit()``.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        # Whoever waited may have gone.
        if not future.done():
            method(value)

    def run() -> None:
        try:
            found: tuple[Callable[[Any], None], Any] = future.set_result, call()
        except BaseException as error:
            found = future.set_exception, UserCodeFailed(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # The loop is closed: the run has ended.
            loop.call_soon_threadsafe(settle, *found)

    threading.Thread(target=run, daemon=True).start()
    return await future
