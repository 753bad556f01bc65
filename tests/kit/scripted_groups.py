"""A source of scripted rollouts and its sampler, for tests of code that samples and scores."""

import asyncio
import contextlib
import functools

from kit.letters import Letters
from vectorlm.data.encoding import encode
from vectorlm.ranks.topology import Topology
from vectorlm.rl.environments.environment import Player, make_environment
from vectorlm.rl.prompts import PromptOrder
from vectorlm.rl.rewards.scorer import RewardScorer
from vectorlm.rl.rollouts.sampler import GroupSampler
from vectorlm.rl.rollouts.source import RolloutSource
from vectorlm.rl.settings import CollectSettings
from vectorlm.types import ENVIRONMENT, Completion, PromptRecord


class InFlight:
    """A group of rollouts in flight."""

    def __init__(self, number, task, version):
        self.number, self.task, self.version = number, task, version
        self.prompt = task.prompt_record.prompt


class Echo:
    """A scripted stand-in for a `GroupQueue` that records its requests; tokens are letters.

    `choose` returns, at each poll, which of the groups in flight finish (default: all).
    """

    def __init__(self, script, choose=list):
        self.script, self.choose, self.calls, self.in_flight = script, choose, [], []
        self.loop = asyncio.new_event_loop()
        self.sampler, self.count, self.most, self.version = None, 0, 0, 4

    def submit(self, tasks):
        started = [InFlight(self.count + index, task, self.version) for index, task in enumerate(tasks)]
        self.count += len(tasks)
        self.in_flight += started
        self.most = max(self.most, len(self.in_flight))
        return [group.number for group in started]

    def poll(self, timeout_s=0.0, at_least=1):
        finished = self.choose(self.in_flight)
        self.in_flight = [group for group in self.in_flight if group not in finished]
        return {group.number: self.sample(group) for group in finished}

    def cancel(self, numbers):
        self.in_flight = [group for group in self.in_flight if group.number not in numbers]

    def metrics(self):
        return {}

    def sample(self, group):
        async def ask(prompt, params):
            self.calls.append((prompt, params))
            return [self.completion(prompt, params, index, group) for index in range(params["n"])]

        return self.loop.run_until_complete(self.sampler.sample(group.task, ask))

    def completion(self, prompt, params, index, group):
        text = self.script(prompt, index)
        ids = tuple(encode(prompt, Letters))
        reason = "length" if text.endswith("…") else "stop"
        versions = (self.version,) * len(text)
        return Completion(ids, tuple(map(ord, text)), (-0.5,) * len(text), versions, text, reason)


class Local:
    """An environment that runs in this process."""

    def __init__(self, make, record):
        self.make, self.record = make, record

    async def reset(self):
        self.player = Player(make_environment(self.make, self.record.columns), "test")
        return await self.player.reset(self.record.prompt, self.record.columns)

    async def step(self, text):
        return await self.player.step(text)

    def naming(self, what):
        return contextlib.nullcontext()

    async def close(self):
        return await self.player.close()


def make_source(
    engine,
    reward,
    *,
    group_size=2,
    num_groups=3,
    num_prompts=20,
    max_tokens=10,
    make=None,
    prompt="q{}".format,
    settings=None,
    needs_greedy=False,
    drops_constant_groups=False,
    compared="returns",
    name="mine",
    **more,
):
    """Return a source over the prompts q0, q1 …; `make` returns environments, and `settings` changes settings."""
    records = [PromptRecord(prompt(index), {"index": index}) for index in range(num_prompts)]
    settings = CollectSettings(
        prompts=tuple(str(record.prompt) for record in records),
        environment=make and "an.py:Environment",
        prompts_per_step=num_groups,
        group_size=group_size,
        sampling_params={"max_tokens": max_tokens},
        **(settings or {}),
    )
    engine.sampler = GroupSampler(
        settings=settings,
        seed=5,
        max_model_len=100,
        tokenizer=Letters(),
        open_environment=make and functools.partial(Local, make),
        needs_greedy=needs_greedy,
    )
    weights = {name: 1.0} | ({} if make is None else {ENVIRONMENT: 1.0})
    scorer = RewardScorer(
        functions={name: reward},
        weights=weights,
        topology=Topology(),
        settings=settings,
        drops_constant_groups=drops_constant_groups,
        compared=compared,
    )
    return RolloutSource(engine, scorer, PromptOrder(records, 0), **more)
