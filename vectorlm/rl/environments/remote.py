"""Run environments in worker processes: one per rollout, or one for all asynchronous environments."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any

import cloudpickle

from vectorlm.data.encoding import is_messages, tools_of
from vectorlm.errors import ConfigError, RolloutError, VectorLMError, WorkerLost
from vectorlm.plugin import load_plugin
from vectorlm.ranks.workers.pool import Worker, WorkerPool
from vectorlm.rl.environments import environment as environments
from vectorlm.rl.environments.environment import Message, Player, Reply
from vectorlm.rl.environments.tools import identity_of, schemas_of
from vectorlm.types import PromptRecord


class EnvironmentWorkers:
    """Workers for the environments of rollouts.

    A synchronous environment has a worker that no other rollout uses at the same time. Asynchronous environments share
    one worker.
    """

    def __init__(self, make: str | Callable[..., Any], workers: WorkerPool, timeout_s: float | None) -> None:
        """Take the class or function, or its name; `timeout_s` is the time limit of a call, None for no limit."""
        self.workers, self.timeout_s = workers, timeout_s
        self.make = make if isinstance(make, str) else cloudpickle.dumps(make)
        self.where = make if isinstance(make, str) else getattr(make, "__name__", str(make))
        self.keys = itertools.count()
        self.schemas: dict[Any, Any] = {}
        """Schemas of the tools of all rollouts so far, by the key that `identity_of` returns."""
        self.describing = asyncio.Lock()
        self._description: asyncio.Task[bool] | None = None
        self._stack = AsyncExitStack()
        self._shared: asyncio.Task[Worker] | None = None

    async def describe(self, record: PromptRecord) -> bool:
        """Return whether the environment is asynchronous, which a worker determines once.

        Call this on the event loop of the workers.
        """
        if self._description is None:
            self._description = asyncio.create_task(self._describe(record))
        return await asyncio.shield(self._description)

    async def shared(self) -> Worker:
        """Return the worker of all asynchronous environments. Call this on the event loop of the workers."""
        if self._shared is None:
            # If the worker of `describe` is free, this takes it: it has imported the user's file. The pool ends it.
            self._shared = asyncio.create_task(self._stack.enter_async_context(self.workers.worker()))
        worker = await asyncio.shield(self._shared)
        worker.is_shared = True
        return worker

    async def _describe(self, record: PromptRecord) -> bool:
        async with self.workers.worker() as worker:
            arguments = self.make, self.where, record.columns
            work = worker.run(f"{__name__}:describe", *arguments, limit_s=self.timeout_s)
            return bool([value async for value in work][-1])


class RemoteEnvironment:
    """The environment of one rollout; its calls may be awaited on any event loop."""

    def __init__(self, host: EnvironmentWorkers, record: PromptRecord) -> None:
        """Store the arguments; `reset` creates the environment."""
        self._host, self._record = host, record
        self._stack = AsyncExitStack()
        self._worker: Worker | None = None
        self._key, self._is_shared = next(host.keys), False
        self._num_turns, self._written, self._is_cancelled = 0, "", False

    def failure(self, what: str, fix: str) -> RolloutError:
        """Return an error that names the environment, the prompt and the turn."""
        return RolloutError(
            f"the environment {self._host.where!r} {what} (prompt {str(self._record.prompt)[:80]!r}, turn "
            f"{self._num_turns}, after {self._written[:80]!r}). {fix}."
        )

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Raise an error of a chat template as a `RolloutError` that names the environment and the prompt."""
        try:
            yield
        except Exception as error:  # A template may raise anything.
            kind = "" if isinstance(error, VectorLMError) else f"{type(error).__name__}: "
            fix = "Change its messages, or the chat template"
            raise self.failure(f"failed, as {what}: {kind}{error}", fix) from error

    async def reset(self) -> Any:
        """Return the first request to the policy: the prompt, the messages that the environment adds, and its tools."""
        record = self._record
        # Call this before the rollout has a worker, because it may wait for another worker.
        self._is_shared = await self._call("describe", record)
        begun = await self._call("begin", self._host.make, self._host.where, record.prompt, record.columns)
        prompt, own_tools = begun
        tools = [*(tools_of(record.columns) or ())] if is_messages(prompt) else []
        if own_tools and not is_messages(prompt):
            raise RolloutError(
                f"the environment {self._host.where!r} has tools, which need a chat template, but the prompt "
                f"{str(prompt)[:80]!r} is not a chat. Write it as messages."
            )
        if own_tools:
            tools += await self._call("describe_tools", own_tools)
        return {"prompt": prompt, "tools": tools} if tools and is_messages(prompt) else prompt

    async def step(self, text: str) -> tuple[Message, Reply]:
        """Return the policy's turn as a message, and the reply to it."""
        self._num_turns += 1
        self._written = text
        found: tuple[Message, Reply] = await self._call("step", text)
        return found

    async def close(self) -> float | None:
        """Close the environment and release its worker; return a reward for the whole rollout, or None."""
        try:
            is_there = self._worker is not None and self._worker.loss is None
            # A cancelled call has ended the worker, unless it is shared.
            is_there = is_there and (self._is_shared or not self._is_cancelled)
            reward: float | None = await self._call("end") if is_there else None
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
            methods = {
                "describe": "its import or constructor",
                "begin": "its constructor or reset",
                "end": "close",
            }
            method = methods.get(what, what.replace("_", " "))
            if what == "step" and isinstance(error, WorkerLost):
                method = "step or a tool"  # Errors of tools go to the policy.
            fix = "Correct the environment, or catch the error in it and return a reply"
            if isinstance(error.__cause__, TimeoutError):
                fix = f"Read the stack of the call in {self._host.workers.output}, or raise rl.environment_timeout_s"
            raise self.failure(f"failed in {method}: {error}", fix) from error

    async def _ask(self, what: str, arguments: tuple[Any, ...]) -> Any:
        if what == "describe":
            return await self._host.describe(*arguments)
        if self._worker is None and self._is_shared:
            self._worker = await self._host.shared()
        elif self._worker is None:
            self._worker = await self._stack.enter_async_context(self._host.workers.worker())
        if what == "describe_tools":
            return await self._describe_tools(self._worker, *arguments)
        function = f"{__name__}:{'play_shared' if self._is_shared else 'play'}"
        work = self._worker.run(function, self._key, what, *arguments, limit_s=self._host.timeout_s)
        return [value async for value in work][-1]

    async def _describe_tools(self, worker: Worker, tools: Sequence[Any]) -> list[Any]:
        host = self._host
        async with host.describing:
            if not host.schemas.keys() >= set(tools):
                # No time limit, because this imports torch.
                found = await worker.ask(f"{__name__}:describe_tools", self._key, host.where)
                host.schemas.update(zip(tools, found, strict=True))
                if not self._is_shared:
                    self._stack.callback(host.workers.end, worker, "it is too large to keep")
        return [host.schemas[tool] for tool in tools]


# The functions below run in the worker.
_players: dict[int, Player] = {}
_runner = asyncio.Runner()


def describe(make: str | bytes, where: str, columns: Mapping[str, Any]) -> Any:
    """Yield None after the import; then whether the environment is asynchronous."""
    made: Any = _loaded(make)
    yield None
    # An instance may hold a container or a session, so one is made only if it may have tools that its class has not.
    if inspect.isclass(made) and not environments.is_asynchronous(made, where):
        yield False
        return
    if not hasattr(made, "respond") or environments.kind_of(made, where) != "respond":
        made = environments.make_environment(made, columns)
    yield environments.is_asynchronous(made, where)
    if not inspect.isclass(made) and hasattr(made, "close"):
        with suppress(Exception):
            _value(made.close())


async def describe_tools(key: int, where: str) -> Any:
    """Yield the tool schemas of a running environment, without blocking other environments."""
    yield await asyncio.to_thread(schemas_of, list(_players[key].tools.values()), where)


def play(key: int, what: str, *arguments: Any) -> Any:
    """Yield None after the import, then the result of a call; awaitables run on an event loop of this process."""
    call = _call(key, what, *arguments, value_of=_at_once)
    yield None
    try:
        call.send(None)
    except StopIteration as returned:
        yield returned.value


async def play_shared(key: int, what: str, *arguments: Any) -> Any:
    """Yield None after the import, then the result of a call; other calls run concurrently."""
    call = _call(key, what, *arguments, value_of=environments.value_of)
    yield None
    yield await call


def _call(key: int, what: str, *arguments: Any, value_of: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return the coroutine of a call of the environment; import the user's file first."""
    if what == "begin":
        make, where, prompt, columns = arguments
        return _begin(key, _loaded(make), where, prompt, columns, value_of)
    return _players[key].step(*arguments) if what == "step" else _end(key)


async def _begin(
    key: int, make: Callable[..., Any], where: str, prompt: Any, columns: Mapping[str, Any], value_of: Any
) -> Any:
    player = _players[key] = Player(environments.make_environment(make, columns), where, value_of)
    prompt = await player.reset(prompt, columns)
    return prompt, [identity_of(tool) for tool in player.tools.values()]


async def _end(key: int) -> float | None:
    return await _players.pop(key).close() if key in _players else None


def run_agent(name: str, url: str, key: str, row: Mapping[str, Any]) -> Any:
    """Yield the reward and the metrics that an agent returns."""
    value = _value(load_plugin(name)(url, key, row))
    numbers = dict(value) if isinstance(value, Mapping) else {"reward": value}
    reward = environments.to_reward(numbers.pop("reward", None))
    yield reward, environments.to_metrics(numbers)


def _loaded(make: str | bytes) -> Callable[..., Any]:
    loaded: Callable[..., Any] = load_plugin(make) if isinstance(make, str) else cloudpickle.loads(make)
    return loaded


def _value(found: Any) -> Any:
    return _runner.run(environments.value_of(found)) if inspect.isawaitable(found) else found


async def _at_once(found: Any) -> Any:
    return _value(found)
