"""Environments of verifiers 0.4, by its public API; left out where it is not installed."""

import asyncio

import pytest
from gateway_client import Scripted
from letters import Letters

from vectorlm.errors import RolloutError
from vectorlm.rollouts.agent import AgentHost
from vectorlm.rollouts.gateway import Gateway
from vectorlm.types import PromptRecord
from vectorlm.workers import WorkerPool

pytest.importorskip("verifiers.v1")
TASKSET = """
import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Words", "Plain"]


class Data(vf.TaskData):
    wanted: str


class Word(vf.Task[Data]):
    @vf.reward
    async def has_word(self, trace: vf.Trace) -> float:
        return float(self.data.wanted in (trace.last_reply or ""))


class Words(vf.Taskset[Word]):
    def load(self):
        for word in ("yes", "no", "broken"):
            yield Word(Data(prompt=f"Say {word}.", wanted=word), self.config.task)


class Plain(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            if data.wanted == "broken":
                raise ValueError("no such word")
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "Again."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
"""


def play(tmp_path, monkeypatch, index):
    """Return the rollout of one task, with a policy that always says yes."""
    (tmp_path / "some_words.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    record = PromptRecord("", {"taskset": "some_words", "index": index})
    engine = Scripted(lambda text, index: " yes ")

    async def run():
        with WorkerPool(1) as pool, Gateway(Letters(), 4000) as gateway:
            name = "vectorlm.rollouts.verifiers:play"
            host = AgentHost(name, gateway, pool, sampling={"max_tokens": 9}, timeout_s=60.0)
            return await host.rollout(record, engine.ask, lambda number: number)

    return asyncio.run(run())


@pytest.mark.parametrize(("index", "reward"), [(0, 1.0), (1, 0.0)])
def test_an_episode_is_a_rollout_with_the_reward_of_its_task(tmp_path, monkeypatch, index, reward):
    rollout = play(tmp_path, monkeypatch, index)
    assert rollout.text == " yes \n<u>Again.\n<a> yes "
    assert sum(rollout.turn_rewards) == reward
    assert rollout.measured == {"turns": 2.0, "truncated": 0.0}
    assert rollout.branches == ()


def test_an_episode_that_failed_is_named(tmp_path, monkeypatch):
    with pytest.raises(RolloutError, match=r"episode failed.*no such word"):
        play(tmp_path, monkeypatch, 2)
