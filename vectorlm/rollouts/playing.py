"""What makes rollouts with environments beside an engine, to train on or to evaluate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.rl.rollout import Rollout
from vectorlm.rl.settings import CollectSettings
from vectorlm.rollouts.environment import AGENT
from vectorlm.rollouts.hosted import EnvironmentHost, HostedEnvironment
from vectorlm.rollouts.queue import GroupQueue
from vectorlm.rollouts.sampler import GroupSampler, Task
from vectorlm.types import PromptRecord
from vectorlm.workers import WorkerPool

if TYPE_CHECKING:
    from vectorlm.engine.engine import SamplingEngine

MAX_ENVIRONMENTS = 64
"""Environments at once beside an engine: each has a process of its own, forked from one without torch."""


class Environments:
    """The environments of a run, by the sources of their prompts; nothing on ranks without an engine."""

    def __init__(
        self,
        names: Mapping[str, str],
        engine: SamplingEngine,
        tokenizer: Any,
        *,
        max_model_len: int,
        timeout_s: float | None,
        stack: ExitStack,
        log_path: Path | None = None,
    ) -> None:
        """Take their names; `stack` closes them, and what their processes print goes to `log_path`."""
        self.names, self.engine, self.stack = names, engine, stack
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self._timeout_s = timeout_s
        self._agents = {source: name for source, name in names.items() if name.startswith(AGENT)}
        self._hosts: dict[str, EnvironmentHost] = {}
        if not names or engine.local is None:
            return
        self._pool = stack.enter_context(WorkerPool(MAX_ENVIRONMENTS, log_path))
        hosted = {source: name for source, name in names.items() if source not in self._agents}
        self._hosts = {
            source: EnvironmentHost(name, self._pool, timeout_s) for source, name in hosted.items()
        }
        if self._agents:
            from vectorlm.rollouts.gateway import Gateway

            self._gateway = stack.enter_context(Gateway(copy.deepcopy(tokenizer), max_model_len))

    def for_sampler(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `GroupSampler` that have them played, with these sampling parameters."""
        if not self.names or self.engine.local is None:
            return {}
        if not self._agents:
            return {"open_environment": self._open}
        from vectorlm.rollouts.agent import AgentHost

        agents = {
            source: AgentHost(
                name.removeprefix(AGENT),
                self._gateway,
                self._pool,
                sampling=sampling,
                timeout_s=self._timeout_s,
            )
            for source, name in self._agents.items()
        }
        return {
            "open_environment": self._open,
            "run_agent": lambda record, *rest: agents[record.source].rollout(record, *rest),
            "agent_sources": agents,
        }

    def _open(self, record: PromptRecord) -> HostedEnvironment | None:
        return HostedEnvironment(self._hosts[record.source], record) if record.source in self._hosts else None

    def player(
        self, settings: CollectSettings, sampling_params: Mapping[str, Any], seed: int
    ) -> Callable[[Sequence[PromptRecord]], list[Sequence[Rollout]]]:
        """Return what plays held-out prompts with the sampling parameters of evaluations; all ranks call it alike.

        The same prompts have the same seeds each time, drawn from `seed` where the parameters have none.
        """
        others = {name: value for name, value in sampling_params.items() if name not in ("n", "seed")}
        settings = replace(settings, sampling_params=others, group_size=sampling_params.get("n") or 1)

        @cache
        def queue() -> GroupQueue:
            sampler = GroupSampler(
                settings=settings,
                seed=sampling_params.get("seed", seed),
                max_model_len=self.max_model_len,
                tokenizer=self.tokenizer,
                **self.for_sampler(settings.sampling),
            )
            made = GroupQueue(self.engine, sampler)
            self.stack.callback(made.close)
            return made

        return lambda records: queue().sample([Task(place, record) for place, record in enumerate(records)])
