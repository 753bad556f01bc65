"""Environments of verifiers 0.4 over its public API; skipped if it is not installed."""

import asyncio
import json
import shutil

import pytest
from kit.gateway_client import Scripted
from kit.letters import Letters
from kit.pages import blocks
from kit.rl_runs import config_of, lines, save_files

import vectorlm
from vectorlm.data.prompts import read_prompts
from vectorlm.data.settings import PromptSettings
from vectorlm.errors import DatasetError, RolloutError
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.rl.agents.agent import AgentHost
from vectorlm.rl.agents.gateway import Gateway
from vectorlm.runs.reinforcement import reinforce

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

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class Settings(vf.TasksetConfig):
    words: list[str] = ["yes", "no", "broken"]


class Words(vf.Taskset[Word, Settings]):
    def load(self):
        for word in self.config.words:
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


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    (tmp_path / "some_words.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Ranks and workers are separate processes.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "some_words"


def play(record, max_model_len=4000):
    """Return the rollout of one task; the policy always answers yes."""
    engine = Scripted(lambda text, index: " yes ")

    async def run():
        with WorkerPool(1) as pool, Gateway(Letters(), max_model_len) as gateway:
            name = "vectorlm.rl.environments.verifiers:play"
            host = AgentHost(name, gateway, pool, sampling={"max_tokens": 9}, timeout_s=60.0)
            return await host.rollout(record, engine.ask, lambda number: number)

    return asyncio.run(run())


@pytest.mark.parametrize(("index", "reward"), [(0, 1.0), (1, 0.0)])
def test_an_episode_is_a_rollout_with_the_reward_of_its_task(taskset, index, reward):
    record = read_prompts(f"verifiers:{taskset}")[index]
    assert record.prompt == f"Say {record.columns['task']['wanted']}."
    rollout = play(record)
    assert rollout.text == " yes \n<u>Again.\n<a> yes "
    assert sum(rollout.turn_rewards) == reward
    assert rollout.measured == {"turns": 2.0, "truncated": 0.0, "has_word": reward, "length": 3.0}
    assert rollout.branches == ()


def test_an_episode_that_failed_is_named(taskset):
    with pytest.raises(RolloutError, match=r"episode failed.*no such word"):
        play(read_prompts(f"verifiers:{taskset}")[2])


def test_an_episode_without_room_for_its_next_turn_is_truncated_and_has_no_reward(taskset):
    rollout = play(read_prompts(f"verifiers:{taskset}")[0], max_model_len=30)
    assert rollout.is_truncated
    assert rollout.turn_rewards == ()


def test_a_taskset_is_selected_from_and_what_is_wrong_with_it_is_said(taskset):
    config = {"taskset": {"words": ["a", "b", "c"]}, "select": {"skip": 1, "limit": 1}}
    (record,) = read_prompts(PromptSettings(verifiers=taskset, config=config))
    assert record.prompt == "Say b."
    with pytest.raises(DatasetError, match="some_worlds"):
        read_prompts("verifiers:some_worlds")
    with pytest.raises(DatasetError, match=r"word\n.*Extra inputs"):
        read_prompts(PromptSettings(verifiers=taskset, config={"taskset": {"word": ["a"]}}))
    with pytest.raises(DatasetError, match="size has no effect with verifiers"):
        read_prompts(PromptSettings(verifiers=taskset, size=3))


# uv installs the modules that verifiers' harness imports.
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not there, which verifiers' harnesses need")
def test_the_taskset_of_the_page_is_played_by_a_harness_of_verifiers(taskset, tmp_path):
    (block,) = [block for block in blocks("docs/agents.md", "python") if "vf.Taskset" in block]
    (tmp_path / "words_of_page.py").write_text(block)
    config = {"agent": {"harness": {"id": "null"}}, "select": {"limit": 1}}
    (record,) = read_prompts(PromptSettings(verifiers="words_of_page", config=config))
    assert play(record).measured == {"turns": 1.0, "truncated": 0.0, "has_word": 1.0, "length": 3.0}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_on_a_taskset(taskset, tmp_path, world_size):
    files = save_files(tmp_path)
    source = json.dumps({"verifiers": taskset, "config": {"taskset": {"words": list("aeiou")}}})
    overrides = [f"rl.prompts={source}", "rl.rewards={}"]
    overrides += [f"evaluation.prompts={source}", "evaluation.rewards=null"]
    overrides += ["rl.max_steps=2", "rl.prompts_per_step=2"]
    config = config_of(files, tmp_path / "out", overrides=overrides)
    vectorlm.launch(reinforce, config, world_size=world_size)
    rollouts = lines(tmp_path / "out" / "rollouts.jsonl")
    assert len(rollouts) == 2 * 2 * 4
    assert {rollout["reward"] for rollout in rollouts} <= {0.0, 1.0}
    last = lines(tmp_path / "out" / "metrics.jsonl")[-1]
    assert last["reward/environment/mean"] == last["logged/has_word"]
    assert 0.0 <= last["eval/accuracy"] == last["eval/accuracy/environment"] <= 1.0
