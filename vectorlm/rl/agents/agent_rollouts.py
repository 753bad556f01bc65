"""Rollouts of an agent, for loops of one's own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from vectorlm.ranks.engine_ranks import comparable
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.rl.agents.agent import AgentHost
from vectorlm.rl.agents.gateway import Gateway
from vectorlm.rl.rollout import Rollout
from vectorlm.rl.rollouts.queue import GroupQueue
from vectorlm.rl.rollouts.sampler import GroupSampler, Task
from vectorlm.rl.settings import CollectSettings
from vectorlm.sampling.engine import SamplingEngine
from vectorlm.types import PromptRecord


class AgentRollouts:
    """Makes rollouts of an agent with an engine, in a loop of your own; a context manager, made on all ranks.

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
        """Take the agent as ``file.py:NAME``, which makes `group_size` rollouts of each row, `num_workers` at once.

        Raises:
            TypeError: `sampling_params`, which are the engine's own when omitted, are not a mapping.
        """
        sampling = engine.sampling_params or {} if sampling_params is None else sampling_params
        if not isinstance(sampling, Mapping):
            raise TypeError(
                f"sampling_params={sampling!r}: agents take a mapping, such as {{'max_tokens': 512}}."
            )
        self._stack, self._num_begun = ExitStack(), 0
        self._ranks = engine.engine_ranks
        settings = CollectSettings(
            prompts=("",), prompts_per_step=1, group_size=group_size, sampling_params=sampling
        )
        agents = {}
        if engine.local is not None:
            pool = self._stack.enter_context(WorkerPool(num_workers))
            gateway = self._stack.enter_context(Gateway(copy.deepcopy(engine.tokenizer), max_model_len))
            host = AgentHost(agent, gateway, pool, sampling=settings.sampling, timeout_s=timeout_s)
            agents[""] = host.rollout
        self._queue = GroupQueue(
            engine,
            GroupSampler(settings=settings, seed=seed, max_model_len=max_model_len, agents=agents),
        )
        self._stack.callback(self._queue.close)

    def sample(self, rows: Sequence[Mapping[str, Any]]) -> list[Sequence[Rollout]]:
        """Return the rollouts of each row, which has a ``prompt``; a collective, with the same result on all ranks.

        Raises:
            RolloutError: The agent failed; the rollouts of the other rows are given up.
            RankMismatch: A rank passed other rows than rank 0.
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
        """End the agents; not a collective."""
        self._stack.close()

    def __enter__(self) -> AgentRollouts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
