"""One rollout's environment in a worker of its own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import cloudpickle

from vectorlm.encoding import is_messages, tools_of
from vectorlm.errors import ConfigError, RolloutError, WorkerLost
from vectorlm.plugin import load_plugin
from vectorlm.rollouts import environment as environments
from vectorlm.rollouts.environment import Message, Player, Reply
from vectorlm.rollouts.tools import schemas_of
from vectorlm.types import PromptRecord
from vectorlm.workers import Worker, WorkerPool


class EnvironmentHost:
    """Gives each rollout an environment, in a worker that no other rollout has meanwhile."""

    def __init__(self, make: str | Callable[..., Any], workers: WorkerPool, timeout_s: float | None) -> None:
        """Take the class or function, or its name; each call may take `timeout_s`."""
        self.workers, self.timeout_s = workers, timeout_s
        self.make = make if isinstance(make, str) else cloudpickle.dumps(make)
        self.where = make if isinstance(make, str) else getattr(make, "__name__", str(make))
        self._tools: asyncio.Task[Any] | None = None

    async def tools(self, record: PromptRecord) -> list[Any]:
        """Return the schemas of the environment's tools, which a worker makes once: it imports torch for them."""
        if self._tools is None:
            self._tools = asyncio.create_task(self._ask_tools(record))
        found: list[Any] = await asyncio.shield(self._tools)
        return found

    async def _ask_tools(self, record: PromptRecord) -> Any:
        async def ask() -> Any:
            async with self.workers.worker() as worker:
                found = await worker.ask(f"{__name__}:describe", self.make, self.where, record.columns)
                if found:
                    self.workers.end(worker, "it is too large to keep")
                return found

        return await asyncio.wrap_future(self.workers.submit(ask()))


class HostedEnvironment:
    """The environment of one rollout; its calls may be awaited on any event loop."""

    def __init__(self, host: EnvironmentHost, record: PromptRecord) -> None:
        """Begin with nothing: `reset` makes the environment."""
        self._host, self._record = host, record
        self._stack = AsyncExitStack()
        self._worker: Worker | None = None
        self._num_turns, self._written, self._is_cancelled = 0, "", False

    async def reset(self) -> Any:
        """Return what the policy is asked first: the prompt with what the environment adds, and its tools."""
        record = self._record
        # First: who waits for a second worker must not have one.
        tools = [*(tools_of(record.columns) or ()), *await self._host.tools(record)]
        prompt = await self._call("begin", self._host.make, self._host.where, record.prompt, record.columns)
        return {"prompt": prompt, "tools": tools} if tools and is_messages(prompt) else prompt

    async def step(self, text: str) -> tuple[Message, Reply]:
        """Return the policy's turn as a message, and the reply to it."""
        self._num_turns += 1
        self._written = text
        found: tuple[Message, Reply] = await self._call("step", text)
        return found

    async def close(self) -> float | None:
        """Close the environment and give its worker back; return a reward for the whole rollout, if there is one."""
        try:
            is_there = self._worker is not None and self._worker.loss is None
            # A call that was cancelled takes its worker along.
            reward: float | None = await self._call("end") if is_there and not self._is_cancelled else None
            return reward
        finally:
            await asyncio.wrap_future(self._host.workers.submit(self._stack.aclose()))

    async def _call(self, what: str, *arguments: Any) -> Any:
        try:
            return await asyncio.wrap_future(self._host.workers.submit(self._ask(what, arguments)))
        except asyncio.CancelledError:
            self._is_cancelled = True
            raise
        except ConfigError:
            raise
        except (WorkerLost, RuntimeError) as error:
            method = {"begin": "reset", "end": "close"}.get(what, what)
            raise RolloutError(
                f"the environment {self._host.where!r} failed in {method}: {error} (prompt "
                f"{str(self._record.prompt)[:80]!r}, turn {self._num_turns}, after {self._written[:80]!r}). Catch the "
                "error there, and return a text, messages or None instead."
            ) from error

    async def _ask(self, what: str, arguments: tuple[Any, ...]) -> Any:
        if self._worker is None:
            self._worker = await self._stack.enter_async_context(self._host.workers.worker())
        work = self._worker.run(f"{__name__}:{what}", *arguments, limit_s=self._host.timeout_s)
        return [value async for value in work][-1]


# What follows runs in the worker.
_players: list[Player] = []
_runner = asyncio.Runner()


def describe(make: str | bytes, where: str, columns: Mapping[str, Any]) -> Any:
    """Yield the schemas of the tools."""
    loaded = _loaded(make)
    tools = []
    # A shorthand has none, and is not made to look for them.
    if not hasattr(loaded, "respond"):
        environment = environments.make_environment(loaded, columns)
        tools = environments.tools_of(environment, environments.kind_of(environment, where))
    yield schemas_of(tools, where) if tools else []


def begin(make: str | bytes, where: str, prompt: Any, columns: Mapping[str, Any]) -> Any:
    """Make the environment, and yield the whole prompt."""
    loaded = _loaded(make)
    yield None
    _players[:] = [Player(environments.make_environment(loaded, columns), where, _value)]
    yield _players[0].reset(prompt, columns)


def step(text: str) -> Any:
    """Yield the policy's turn as a message, and the reply."""
    yield None
    yield _players[0].step(text)


def end() -> Any:
    """Yield the reward for the whole rollout."""
    yield None
    yield _players.pop().close() if _players else None


def run_agent(name: str, url: str, key: str, row: Mapping[str, Any]) -> Any:
    """Yield the reward that an agent gives, and what it measured."""
    value = _value(load_plugin(name)(url, key, row))
    numbers = dict(value) if isinstance(value, Mapping) else {"reward": value}
    reward = numbers.pop("reward", None)
    if isinstance(reward, str | bytes):
        raise TypeError(f"it returned {reward!r}, and must return a number, a mapping with a reward, or None")
    yield None if reward is None else float(reward), {key: float(each) for key, each in numbers.items()}


def _loaded(make: str | bytes) -> Callable[..., Any]:
    loaded: Callable[..., Any] = load_plugin(make) if isinstance(make, str) else cloudpickle.loads(make)
    return loaded


def _value(found: Any) -> Any:
    async def wait() -> Any:
        return await found

    return _runner.run(wait()) if inspect.isawaitable(found) else found
