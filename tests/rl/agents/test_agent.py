"""Agents in workers: they produce the same rollouts as environments, and cannot hang a run."""

import asyncio
import re

import pytest
from kit.gateway_client import Scripted
from kit.letters import Letters
from kit.pages import blocks

from vectorlm.errors import RolloutError
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.rl.agents.agent import AgentHost
from vectorlm.rl.agents.gateway import Gateway
from vectorlm.rl.rollouts.sampler import GroupSampler, Task
from vectorlm.rl.settings import CollectSettings
from vectorlm.types import PromptRecord

AGENTS = """
import asyncio, json, os, time, urllib.error, urllib.request

def ask(url, key, path, **asked):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]

async def two_turns(url, key, row):
    text = ask(url, key, "/completions", prompt=row["prompt"])["text"]
    ask(url, key, "/completions", prompt=row["prompt"] + text + "so?")
    return {"reward": row["number"] / 2, "turns": 2}

def once(url, key, row):
    ask(url, key, "/completions", prompt=row["prompt"])

def raises(url, key, row):
    raise KeyError("no tool")

def silent(url, key, row):
    return 1.0

def refused(url, key, row):
    ask(url, key, "/completions", prompt=row["prompt"], seed=3)

def hangs(url, key, row):
    ask(url, key, "/completions", prompt=row["prompt"])
    time.sleep(60)

def wrong(url, key, row):
    ask(url, key, "/completions", prompt=row["prompt"])
    return "good"

def ends(url, key, row):
    os._exit(3)

def no_room(url, key, row):
    ask(url, key, "/completions", prompt="q" * 4000)

def spies(url, key, row):
    once(url, key, row)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    assert key.encode() not in file.read()
            except OSError:
                continue
    return 1.0

def too_long(url, key, row):
    ask(url, key, "/completions", prompt=row["prompt"])
    ask(url, key, "/completions", prompt="x" * 5000)

def goes_on(url, key, row):
    try:
        too_long(url, key, row)
    except urllib.error.HTTPError:
        once(url, key, row)
    return 1.0

def goes_on_and_raises(url, key, row):
    goes_on(url, key, row)
    raise KeyError("no tool")

def goes_on_and_ends(url, key, row):
    goes_on(url, key, row)
    os._exit(3)

def goes_on_and_hangs(url, key, row):
    goes_on(url, key, row)
    time.sleep(60)

def goes_on_too_long(url, key, row):
    goes_on(url, key, row)
    too_long(url, key, row)

def gives_up(url, key, row):
    try:
        too_long(url, key, row)
    except urllib.error.HTTPError:
        return 1.0

async def side_by_side(url, key, row):
    import httpx
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        async def post(prompt):
            answer = await client.post(url + "/completions", json={"prompt": prompt})
            answer.raise_for_status()
        await post("q")
        await asyncio.gather(post("x" * 5000), post("slow"))

def several(url, key, row):
    for _ in range(2):
        ask(url, key, "/completions", prompt=row["prompt"], n=2)
    return 1.0
"""


def sample(
    tmp_path,
    name,
    group_size=3,
    timeout_s=20.0,
    code=AGENTS,
    answer=lambda text: " yes ",
    later_s=0.0,
    needs_reward=False,
):
    """Return the rollouts of one group, its engine and settings; answers after the first take `later_s` seconds."""
    (tmp_path / "agents.py").write_text(code)

    def say(text, index):
        engine.delay_s = later_s
        return answer(text)

    engine = Scripted(say)
    settings = CollectSettings(
        prompts=("q",),
        prompts_per_step=1,
        group_size=group_size,
        sampling_params={"max_tokens": 10, "logprobs": None},
    )
    record = PromptRecord("q", {"number": 3})

    async def run():
        with WorkerPool(4) as pool, Gateway(Letters(), 4000) as gateway:
            host = AgentHost(
                f"{tmp_path}/agents.py:{name}",
                gateway,
                pool,
                sampling=settings.sampling,
                timeout_s=timeout_s,
                needs_reward=needs_reward,
            )
            sampler = GroupSampler(settings=settings, seed=5, max_model_len=4000, agents={"": host.rollout})
            found = await sampler.sample(Task(7, record), engine.ask)
            assert not gateway._sessions
            return found.rollouts

    return asyncio.run(run()), engine, settings


def test_an_agent_makes_a_rollout_and_gives_the_reward(tmp_path):
    rollouts, engine, settings = sample(tmp_path, "two_turns")
    sampler = GroupSampler(settings=settings, seed=5, max_model_len=4000)
    seeds = [sampler._seed_of_turn(7, index, turn) for index in range(3) for turn in range(2)]
    assert len(set(seeds)) == 6
    assert sorted(params["seed"] for params in engine.params) == sorted(seeds)
    # The correction needs log-probabilities, even if the run's parameters turn them off.
    assert {params["logprobs"] for params in [*engine.params, sampler._params]} == {0}
    for rollout in rollouts:
        assert rollout.text == " yes so? yes "
        assert rollout.turn_rewards == (0.0, 1.5)
        assert rollout.measured == {"turns": 2.0}


def test_completions_of_one_request_have_other_seeds_than_other_rollouts(tmp_path):
    _, engine, _ = sample(tmp_path, "several")
    seeds = [params["seed"] + index for params in engine.params for index in range(params["n"])]
    assert len(set(seeds)) == len(seeds) == 12


def test_an_agent_that_gives_no_reward_leaves_it_to_others(tmp_path):
    rollouts, *_ = sample(tmp_path, "once", group_size=1)
    assert rollouts[0].turn_rewards == ()
    with pytest.raises(RolloutError, match=r"'.*:once' returned no reward.*rl\.rewards"):
        sample(tmp_path, "once", group_size=1, needs_reward=True)
    # An agent that failed because the context is full has a reward of 0.
    assert sample(tmp_path, "too_long", group_size=1, needs_reward=True)[0][0].is_truncated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_truncated", "reward"),
    [
        ("too_long", True, 0.0),
        ("goes_on", False, 1.0),
        ("goes_on_too_long", True, 0.0),
        ("gives_up", True, 1.0),
        # A request that runs concurrently with the refused one does not show that the agent continues.
        ("side_by_side", True, 0.0),
    ],
)
def test_without_room_for_a_further_turn_a_rollout_ends_and_not_the_run(tmp_path, name, is_truncated, reward):
    (rollout,), *_ = sample(tmp_path, name, group_size=1, later_s=10.0 if name == "side_by_side" else 0.0)
    assert (rollout.text, rollout.is_truncated, sum(rollout.turn_rewards)) == (" yes ", is_truncated, reward)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "KeyError: 'no tool'.*agents.py:19"),
        ("silent", "without an answer of the policy"),
        # Python's HTTP client alone would report only "Bad Request".
        ("refused", "HTTP Error 400.*its request was refused: seed=3.*Change the request"),
        ("no_room", "prompt has 4000 tokens.*length of 4000.*Shorten the prompt"),
        (
            "hangs",
            "no request and no result within 1 s.*stack in the output of this process.*rl.environment_timeout_s",
        ),
        ("wrong", "it returned the reward 'good', which must be a number"),
        ("ends", "its process"),
        ("goes_on_and_raises", "KeyError: 'no tool'"),
        ("goes_on_and_ends", "its process"),
        ("goes_on_and_hangs", "no request and no result within 1 s"),
    ],
)
def test_an_agent_that_fails_is_named(tmp_path, name, why):
    with pytest.raises(RolloutError, match=why):
        sample(tmp_path, name, timeout_s=1.0 if name.endswith("hangs") else 20.0)


def test_the_key_is_in_no_command_line_and_no_environment(tmp_path):
    rollouts, *_ = sample(tmp_path, "spies", group_size=1)
    assert rollouts[0].turn_rewards == (1.0,)


@pytest.mark.parametrize("number", [0, 1])
def test_the_agents_of_the_page_run(tmp_path, number):
    pytest.importorskip("openai")
    block = blocks("docs/agents.md", "python")[number]
    (name,) = re.findall(r"^(?:async )?def (\w+)\(client_url", block, re.M)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    answers = {
        "guess": lambda text: "It is 3." if "Try again" in text else "It is 4.",
        "adds": lambda text: "3" if "<t>3" in text else call,
    }
    (rollout,), *_ = sample(tmp_path, name, group_size=1, code=block, answer=answers[name])
    assert sum(rollout.turn_rewards) == 1.0
    assert rollout.num_turns == 2
    assert rollout.branches == ()
