"""Build samplers of rollouts with environments and agents, for training and evaluation."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.rl.environments.environment import AGENT
from vectorlm.rl.environments.remote import EnvironmentWorkers, RemoteEnvironment
from vectorlm.rl.rollout import Rollout
from vectorlm.rl.rollouts.queue import GroupQueue
from vectorlm.rl.rollouts.sampler import Agent, GroupSampler, Results, Task
from vectorlm.rl.settings import CollectSettings
from vectorlm.types import PromptRecord

if TYPE_CHECKING:
    from vectorlm.rl.agents.gateway import Gateway
    from vectorlm.sampling.engine import SamplingEngine

MAX_ENVIRONMENTS = 64
"""Maximum number of worker processes per engine; all are forked from a process without torch."""


class SamplerBuilder:
    """Builds samplers with the environments and agents of a run; starts no workers on ranks without an engine."""

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
        asks_adapters: bool = False,
    ) -> None:
        """Take the environments' names by prompt source; `stack` closes the workers, which print to `log_path`.

        With `asks_adapters`, environments and rewards may ask the engine's adapters through the gateway.
        """
        self.names, self.engine, self.stack = names, engine, stack
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self._timeout_s = timeout_s
        self._agents: dict[str, str] = {}
        self._hosts: dict[str, EnvironmentWorkers] = {}
        self.gateway: Gateway | None = None
        """The gateway; None on ranks without an engine, and if nothing uses it."""
        self._gives_access = asks_adapters
        if engine.local is None:
            return
        if asks_adapters or any(name.startswith(AGENT) for name in names.values()):
            from vectorlm.rl.agents.gateway import Gateway

            gateway = Gateway(copy.deepcopy(tokenizer), max_model_len, engine)
            self.gateway = stack.enter_context(gateway)
        if not names:
            return
        self._pool = stack.enter_context(WorkerPool(MAX_ENVIRONMENTS, log_path))
        for source, name in names.items():
            if name.startswith(AGENT):
                self._agents[source] = name.removeprefix(AGENT)
            else:
                self._hosts[source] = EnvironmentWorkers(name, self._pool, timeout_s)

    def sampler(
        self,
        settings: CollectSettings,
        seed: int,
        *,
        needs_greedy: bool = False,
        score: Callable[[Sequence[Rollout]], Awaitable[Results]] | None = None,
        is_trained_on: bool = True,
        unscored: Collection[str] = (),
    ) -> GroupSampler:
        """Return a sampler of groups that plays these environments.

        The agents of the sources in `unscored` must return a reward, because nothing else scores their rollouts.
        """
        agents: dict[str, Agent] = {}
        for source, name in self._agents.items():
            from vectorlm.rl.agents.agent import AgentHost

            assert self.gateway is not None
            host = AgentHost(
                name,
                self.gateway,
                self._pool,
                sampling=settings.sampling,
                timeout_s=self._timeout_s,
                is_trained_on=is_trained_on,
                needs_reward=source in unscored,
            )
            agents[source] = host.rollout
        return GroupSampler(
            settings=settings,
            seed=seed,
            max_model_len=self.max_model_len,
            tokenizer=self.tokenizer,
            open_environment=self._open if self._hosts else None,
            open_access=self._open_access(settings),
            agents=agents,
            needs_greedy=needs_greedy,
            score=score,
        )

    def _open_access(self, settings: CollectSettings) -> Any:
        if self.gateway is None or not self._gives_access:
            return None
        return partial(self.gateway.access, sampling=settings.sampling)

    def _open(self, record: PromptRecord) -> RemoteEnvironment | None:
        host = self._hosts.get(record.source)
        return None if host is None else RemoteEnvironment(host, record)

    def player(
        self, settings: CollectSettings, sampling_params: Mapping[str, Any], seed: int
    ) -> Callable[[Sequence[PromptRecord]], list[Sequence[Rollout]]]:
        """Return a function that plays held-out prompts with an evaluation's sampling parameters; all ranks call it.

        A prompt gets the same seeds in every evaluation, drawn from `seed` if the parameters have none.
        """
        others = {name: value for name, value in sampling_params.items() if name not in ("n", "seed")}
        settings = replace(settings, sampling_params=others, group_size=sampling_params.get("n") or 1)

        @cache
        def queue() -> GroupQueue:
            asked = sampling_params.get("seed")
            # NumPy's seeds are not negative, as vLLM's may be.
            own_seed = seed if asked is None else asked % 2**64
            sampler = self.sampler(settings, own_seed, is_trained_on=False)
            made = GroupQueue(self.engine, sampler)
            self.stack.callback(made.close)
            return made

        return lambda records: queue().sample([Task(place, record) for place, record in enumerate(records)])
