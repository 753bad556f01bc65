"""Run the user's agent, which makes rollouts through the gateway."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from vectorlm.errors import RolloutError, WorkerLost
from vectorlm.ranks.engine_ranks import comparable
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.rl.agents.gateway import Gateway
from vectorlm.rl.agents.session import Session
from vectorlm.rl.environments import remote
from vectorlm.rl.rollout import Rollout
from vectorlm.rl.rollouts.queue import GroupQueue
from vectorlm.rl.rollouts.sampler import Ask, GroupSampler, Task
from vectorlm.rl.settings import CollectSettings
from vectorlm.sampling.engine import SamplingEngine
from vectorlm.types import PromptRecord

POLL_S = 0.5


class AgentHost:
    """Runs an agent once per rollout, in a worker that no other rollout uses at the same time.

    An agent is a function or coroutine function ``run(client_url, key, row)``. It returns a reward, a mapping with a
    ``reward`` and further metrics, or None.
    """

    def __init__(
        self,
        run: str,
        gateway: Gateway,
        workers: WorkerPool,
        *,
        sampling: Mapping[str, Any],
        timeout_s: float | None,
        is_trained_on: bool = True,
        needs_reward: bool = False,
    ) -> None:
        """Take the agent's name; `timeout_s` is the longest time between two of its requests, None for no limit.

        With `needs_reward`, nothing else scores its rollouts, and returning None is an error.
        """
        self._run, self._gateway, self._workers = run, gateway, workers
        self._sampling, self._timeout_s = sampling, math.inf if timeout_s is None else timeout_s
        self._is_trained_on, self._needs_reward = is_trained_on, needs_reward

    async def rollout(self, record: PromptRecord, ask: Ask, seed_of: Callable[[int], int]) -> Rollout:
        """Return the agent's rollout of a prompt.

        Raises:
            RolloutError: The agent raised, sent no request, timed out, or returned no reward although it must.
        """
        gateway = self._gateway
        session = Session(
            ask,
            gateway.tokenizer,
            sampling=self._sampling,
            max_model_len=gateway.max_model_len,
            seed_of=seed_of,
            is_trained_on=self._is_trained_on,
        )
        gateway.open(session)
        work = asyncio.wrap_future(self._workers.submit(self._work(session, record)))
        try:
            while not (await asyncio.wait({work}, timeout=POLL_S))[0]:
                if session.idle_s > self._timeout_s:
                    raise TimeoutError(f"no request and no result within {self._timeout_s:g} s")
            reward, measured = work.result()
        except (WorkerLost, RuntimeError, TimeoutError) as error:
            # Frameworks raise if the context is full. The error ends the rollout, not the run.
            if not session.is_full:
                refusal, fix = "", "Correct the agent, or catch the error in it and return a reward or None"
                if isinstance(error, TimeoutError):
                    fix = (
                        f"Read the agent's stack in {self._workers.output}, or raise rl.environment_timeout_s (in your "
                        "own loop, timeout_s of AgentRollouts)"
                    )
                elif session.refusal:
                    fix = "Change the request"
                    # Clients that raise for a status may not show the gateway's answer.
                    if session.refusal not in str(error):
                        refusal = f", after its request was refused: {session.refusal}"
                raise RolloutError(
                    f"the agent {self._run!r} failed: {error}{refusal} (prompt {str(record.prompt)[:80]!r}). {fix}."
                ) from error
            reward, measured = None, {}
        finally:
            work.cancel()
            gateway.end(session)
            session.close()
        rollout = replace(session.rollout(record), measured=measured)
        if reward is None and self._needs_reward and not session.is_full:
            raise RolloutError(
                f"the agent {self._run!r} returned no reward, and no reward function scores its rollouts (prompt "
                f"{str(record.prompt)[:80]!r}). Return a number from the agent, or set rl.rewards."
            )
        return rollout.rewarded(reward)

    async def _work(self, session: Session, record: PromptRecord) -> tuple[float | None, dict[str, float]]:
        row = {**record.columns, "prompt": record.prompt}
        async with self._workers.worker() as worker:
            session.begin()
            found: tuple[float | None, dict[str, float]] = await worker.ask(
                f"{remote.__name__}:run_agent", self._run, self._gateway.url, session.key, row
            )
            return found


class AgentRollouts:
    """Rollouts of an agent, for your own training loop. A context manager; create it on all ranks.

    Example:
        >>> with AgentRollouts(engine, "agents.py:guess", max_model_len=2048) as agents:  # doctest: +SKIP
        ...     for step, rows in enumerate(batches):
        ...         groups = agents.sample(rows)
        ...         train_on(groups)
        ...         engine.update(model, step + 1)
    """

    def __init__(
        self,
        engine: SamplingEngine,
        agent: str,
        *,
        max_model_len: int,
        group_size: int = 1,
        sampling_params: Mapping[str, Any] | None = None,
        timeout_s: float | None = 300.0,
        num_workers: int = 8,
        seed: int = 0,
    ) -> None:
        """Take the agent as ``file.py:NAME``. It makes `group_size` rollouts per row, `num_workers` at a time.

        Without `sampling_params`, the engine's own parameters apply.

        Raises:
            TypeError: `sampling_params` are not a mapping.
        """
        sampling = engine.sampling_params or {} if sampling_params is None else sampling_params
        if not isinstance(sampling, Mapping):
            raise TypeError(
                f"sampling_params={sampling!r}: agents need a mapping. Pass {{'max_tokens': 512}}, for example."
            )
        self._stack, self._num_begun = ExitStack(), 0
        self._ranks = engine.engine_ranks
        settings = CollectSettings(
            prompts=("",), prompts_per_step=1, group_size=group_size, sampling_params=sampling
        )
        agents = {}
        if engine.local is not None:
            pool = self._stack.enter_context(WorkerPool(num_workers))
            tokenizer = copy.deepcopy(engine.tokenizer)
            gateway = self._stack.enter_context(Gateway(tokenizer, max_model_len, engine))
            host = AgentHost(agent, gateway, pool, sampling=settings.sampling, timeout_s=timeout_s)
            agents[""] = host.rollout
        self._queue = GroupQueue(
            engine,
            GroupSampler(settings=settings, seed=seed, max_model_len=max_model_len, agents=agents),
        )
        self._stack.callback(self._queue.close)

    def sample(self, rows: Sequence[Mapping[str, Any]]) -> list[Sequence[Rollout]]:
        """Return the rollouts of every row; a row has a ``prompt``. All ranks call this and get the same result.

        Raises:
            RolloutError: The agent failed; the rollouts of all rows are cancelled.
            RankMismatch: A rank passed different rows than rank 0.
        """
        self._ranks.check_same_args("sample", comparable({"rows": list(rows)}), f"{len(rows)} rows")
        tasks = [
            Task(
                self._num_begun + index,
                PromptRecord(row["prompt"], {name: value for name, value in row.items() if name != "prompt"}),
            )
            for index, row in enumerate(rows)
        ]
        self._num_begun += len(tasks)
        return self._queue.sample(tasks)

    def close(self) -> None:
        """Stop the agents; ranks need not call this together."""
        self._stack.close()

    def __enter__(self) -> AgentRollouts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
