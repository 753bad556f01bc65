"""Checks of every built-in reward: the text that it sees, no exceptions, and its use in a run."""

import asyncio
import functools
import json
import math

import pytest
import yaml
from kit.every_reward import COLUMNS, judge_server, spelled, written
from kit.letters import Letters
from kit.rank_processes import save_tiny_llama
from kit.scripted_groups import Local
from kit.sft_runs import lines

from vectorlm.rl.agents.session import Session
from vectorlm.rl.environments.environment import Reply
from vectorlm.rl.rewards import code as limited
from vectorlm.rl.rewards import registry
from vectorlm.rl.rewards.function import shown
from vectorlm.rl.rewards.runner import Scorable, run_reward
from vectorlm.rl.rollouts.sampler import GroupSampler, Task
from vectorlm.rl.settings import CollectSettings
from vectorlm.runs.config.load import load_config
from vectorlm.runs.reinforcement import reinforce
from vectorlm.sampling.inline_engines import FakeEngine
from vectorlm.types import Completion, PromptRecord

ANSWER = """\\boxed{7} <answer>3 + 4</answer> 7 {"name": "x"}
```json
7
```
```python
def f(x):
    return x + 4
```
"""


@pytest.fixture(scope="module")
def judge():
    with judge_server() as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def quick_limit():
    """Lower the CPU limit, for completions that would keep a reward busy."""
    patch = pytest.MonkeyPatch()
    patch.setattr(limited, "CPU_S", 0.25)
    yield
    patch.undo()


def completion_of(text):
    return Completion((1,), tuple(map(ord, text)), (-1.0,) * len(text), (0,) * len(text), text, "stop")


def played(environment, *said, is_chat=True):
    """Return the rollout of a policy that writes these texts, one per turn."""
    left = iter(said)

    async def ask(prompt, params, hear=None):
        return [completion_of(next(left))]

    settings = CollectSettings(
        prompts=("q",), prompts_per_step=1, group_size=1, max_turns=9, sampling_params={"max_tokens": 500}
    )
    sampler = GroupSampler(
        settings=settings,
        seed=0,
        max_model_len=10**6,
        tokenizer=Letters(),
        open_environment=functools.partial(Local, lambda: environment),
    )
    prompt = [{"role": "user", "content": "3 + 4?"}] if is_chat else "3 + 4?"
    return asyncio.run(sampler.sample(Task(0, PromptRecord(prompt, COLUMNS)), ask)).rollouts[0]


class Says:
    """An environment that replies to two turns: with messages of a role, or with a text if the role is None."""

    def __init__(self, role, content):
        self.role, self.content, self.num_turns = role, content, 0

    def step(self, message):
        self.num_turns += 1
        if self.num_turns == 3:
            return Reply(done=True)
        return self.content if self.role is None else [{"role": self.role, "content": self.content}]


class Looks(Says):
    """An environment that returns the content from a tool, which the policy calls."""

    def __init__(self, role, content):
        super().__init__(role, content)
        self.tools = [self.look]

    def look(self) -> str:
        """Look it up."""
        return self.content

    def step(self, message):
        return Reply(done=True)


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
INDIFFERENT = ("judge", "length", "repetition")
"""Rewards that do not prefer a right answer; the test also compares the texts that they see."""
PLACES = [
    (Says, "assistant", True),
    (Says, None, False),
    (Looks, "tool", True),
    pytest.param(Says, "user", True, marks=pytest.mark.slow),
    pytest.param(Says, None, True, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "role", "is_chat"), PLACES)
@pytest.mark.parametrize("name", registry.reward_names())
def test_what_an_environment_says_changes_no_reward(judge, name, kind, role, is_chat):
    """The environment states the answer in every form, or states nothing."""
    said = [CALL, CALL, "no idea"] if kind is Looks else ["let me think", "so", "no idea"]
    found = []
    answer, other = run_reward(
        spelled(name, url=judge.url),
        [Scorable(text, "q", (1,) * len(text), COLUMNS) for text in (ANSWER, "no idea")],
    )
    assert answer.error is None
    assert answer.reward > other.reward or name in INDIFFERENT, "the environment's words would not be noticed"
    for content in (ANSWER, "-"):
        judge.asked.clear()
        rollout = played(kind(role, content), *said, is_chat=is_chat)
        (result,) = run_reward(spelled(name, url=judge.url), [shown(rollout)])
        assert result.error is None
        found.append((repr(result), list(judge.asked)))
    assert found[0] == found[1]
    assert rollout.num_turns == 3


@pytest.mark.parametrize(("kind", "role", "is_chat"), PLACES)
def test_own_functions_see_the_turns_of_the_policy_in_a_text_a_list_and_tokens(kind, role, is_chat):
    said = [CALL, CALL, "c"] if kind is Looks else ["a", "b", "c"]
    rollout = played(kind(role, "SECRET"), *said, is_chat=is_chat)
    seen = []

    def one(completion, completion_ids):
        seen.extend([completion, "".join(map(chr, completion_ids))])
        return 0.0

    def several(completions, completion_ids):
        (ids,) = completion_ids
        (whole,) = completions
        if is_chat:
            whole = [message["content"] for message in whole if message["role"] == "assistant"]
        seen.extend([str(whole), "".join(map(chr, ids))])
        return [0.0]

    for reward in (one, several):
        assert run_reward(reward, [shown(rollout)])[0].error is None
    assert seen[0] == "\n".join(said)
    assert seen[1] == seen[3] == "".join(said)
    assert "SECRET" not in seen[2]
    assert seen[2].count("c") >= 1
    assert "SECRET" in rollout.text


def test_an_agents_words_are_no_part_of_the_completion():
    """These are the agent's prompt, a beginning or made-up answer, and its messages between two answers."""
    texts = iter(["one", "two"])

    async def ask(prompt, params, hear=None):
        text = next(texts)
        return [Completion(tuple(prompt), tuple(map(ord, text)), (-1.0,) * 3, (0,) * 3, text, "stop")]

    async def talk():
        loop = asyncio.get_running_loop()
        session = Session(ask, Letters(), sampling={"max_tokens": 9}, max_model_len=10**6)
        chat = [{"role": "user", "content": "q"}]

        async def in_thread(messages):
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(session.chat(messages, None, {}), loop)
            )

        await in_thread(chat)
        hint = [{"role": role, "content": "SECRET"} for role in ("user", "assistant", "user")]
        begun = {"role": "assistant", "content": "SECRET so "}
        (turn,) = await in_thread([*chat, {"role": "assistant", "content": "one"}, *hint, begun])
        turn.is_read = True
        return session.rollout(PromptRecord([{"role": "user", "content": "q"}], {}))

    rollout = asyncio.run(talk())
    seen = []

    def several(completions, completion_ids):
        seen.extend(message["content"] for message in completions[0] if message["role"] == "assistant")
        return [0.0]

    assert run_reward(several, [shown(rollout)])[0].error is None
    assert "SECRET" not in str(seen)
    assert seen[-1] == "two"
    assert "SECRET" not in shown(rollout).text


def test_a_single_turn_is_shown_as_it_is():
    rollout = played(Looks("tool", "SECRET"), "a\nb")
    assert rollout.num_turns == 1
    assert shown(rollout).text == rollout.text == "a\nb"


SLOW = {"code": 30, "judge": 15, "math": 100, "reasoning_gym": 100, "ifeval": 100}
"""Number of completions for rewards that use another process; all other rewards get 2,000."""


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.reward_names())
def test_nothing_that_a_policy_writes_makes_a_reward_raise(judge, name):
    items = [
        Scorable(text, "q", tuple(range(len(text) % 50)), COLUMNS)
        for text in written(0, SLOW.get(name, 2000))
    ]
    results = run_reward(spelled(name, url=judge.url), items)
    wrong = [
        (item.text[:80], result)
        for item, result in zip(items, results, strict=True)
        if result.error is not None or not (math.isnan(result.reward) or math.isfinite(result.reward))
    ]
    assert wrong == []


def test_a_run_takes_every_reward_for_its_rollouts_and_its_evaluations(judge, tmp_path):
    save_tiny_llama(tmp_path / "model", vocab_size=128)
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"prompt": "3+4", **COLUMNS}) + "\n")
    names = [spelled(name, url=judge.url) for name in registry.reward_names()]
    config = {
        "model": str(tmp_path / "model"),
        "train_parameters": {
            "output_dir": str(tmp_path / "run"),
            "max_seq_len": 64,
            "optimizer": {"lr": 1.0e-3},
            "sampler": {"prompts": str(questions), "reward": names[0], "further_rewards": names[1:]},
        },
        "rl": {
            "algorithm": "grpo",
            "max_steps": 1,
            "prompts": str(questions),
            "prompts_per_step": 1,
            "group_size": 2,
            "sampling_params": {"max_tokens": 16},
            "rewards": dict.fromkeys(names, 1.0),
            "reward_workers": 0,  # Worker processes would import all modules again.
        },
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with FakeEngine(lambda prompt, version: r"\boxed{7}", sampling_params={"max_tokens": 16}) as engine:
        reinforce(load_config(tmp_path / "config.yaml", []), engine=engine)
    first, last = lines(tmp_path / "run/metrics.jsonl")
    assert {name for name in registry.reward_names() if f"reward/{name}/mean" not in last} == set()
    assert {name for name in registry.reward_names()[1:] if f"eval/reward/{name}" not in first} == set()
    assert last["reward/boxed/mean"] == last["reward/math/mean"] == first["eval/reward"] == 1.0
    assert last["reward/length/mean"] == pytest.approx(0.9)
