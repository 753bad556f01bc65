"""Whole LoRA runs whose engine keeps older policies: names, answers, kill and resume, updates in flight."""

import json
import math
import re
import shutil
from contextlib import nullcontext
from unittest import mock

import pytest
from kit.rank_processes import forked
from kit.rl_runs import check_rl, config_of, cut_after_step_2, lines, numbers, save_files

from vectorlm.errors import ConfigError, RewardError
from vectorlm.rl.rollouts.queue import GroupQueue
from vectorlm.rl.rollouts.source import RolloutSource
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.preflight.rl import older_judge_problems
from vectorlm.runs.reinforcement import reinforce

LORA = "train_parameters.lora_peft_config={r: 4, target_modules: [q_proj, v_proj]}"
KEEP = ["rl.keep_adapters={every: 1, last: 2}", "rl.max_steps=4", LORA, "train_parameters.optimizer.lr=0.02"]
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return save_files(tmp_path_factory.mktemp("adapters"))


def watched(config):
    """Train; return each step's answers by adapter: tokens, log-probabilities and versions."""
    seen, engines = {}, []
    collect, make = RolloutSource.collect, GroupQueue.__init__

    def note(queue, engine, sampler):
        engines.append(engine)
        make(queue, engine, sampler)

    def look(source, step, timer):
        (engine,) = engines
        seen[step] = {
            name: [
                (completion.token_ids, completion.sampler_logprobs, {*completion.versions})
                for (completion,) in engine.sample([[2, 3, 4], [7, 8]], GREEDY, adapter=name)
            ]
            for name in engine.adapters
        }
        return collect(source, step, timer)

    with (
        mock.patch.object(RolloutSource, "collect", look),
        mock.patch.object(GroupQueue, "__init__", note),
    ):
        reinforce(config)
    return seen


def require_kept(seen):
    """Require that kept policies answer as after their own step, and the reference as before training."""
    for step, by_name in seen.items():
        kept = {f"policy@{older}" for older in (step - 1, step) if older > 0}
        assert by_name.keys() == {"policy", "base", "reference"} | kept
        for name, answers in by_name.items():
            at = int(name.partition("@")[2] or (step if name == "policy" else 0))
            if at not in seen:
                continue
            for mine, theirs in zip(answers, seen[at]["policy"], strict=True):
                assert mine[0] == theirs[0]
                assert mine[1] == pytest.approx(theirs[1], abs=1e-5)
                # The base is shared with the trainer, and updates do not send it.
                assert mine[2] == {-1 if name == "base" else at}
    first, last = (seen[step]["policy"][0][1] for step in (min(seen), max(seen)))
    assert first != last, "nothing was learned, so nothing was compared"


@pytest.mark.slow
def test_older_policies_answer_as_they_did_also_after_a_kill(files, tmp_path):
    config = config_of(files, tmp_path / "whole", overrides=KEEP)
    for seen in (whole := forked(watched, config)):
        assert seen.keys() == set(range(4))
        require_kept(seen)
    cut_after_step_2(tmp_path / "whole", tmp_path / "resumed")
    config = config_of(files, tmp_path / "resumed", overrides=KEEP)
    for seen, before in zip(forked(watched, config), whole, strict=True):
        assert seen.keys() == {2, 3}
        assert seen == {step: before[step] for step in seen}
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "resumed")


@pytest.mark.slow
def test_older_policies_join_an_engine_with_requests_in_flight(files, tmp_path):
    more = ["rl.async={max_staleness: 2}", "rl.sampling_params={max_tokens: 30}"]
    config = config_of(files, tmp_path / "run", overrides=[*KEEP, *more])
    require_kept(forked(watched, config, world_size=1)[0])


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["rl.keep_adapters={every: 2}"], "rl.keep_adapters"),
        (["rl.keep_adapters={every: 2}", LORA, "engine.lora_mode=merged"], "rl.keep_adapters"),
        (["rl.keep_adapters={every: 2, last: 3}", LORA, "engine.max_loras=3"], "engine.max_loras"),
        (["rl.keep_adapters={every: 0}", LORA], "rl.keep_adapters.every"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(files, tmp_path, overrides, setting):
    with pytest.raises(ConfigError, match=setting):
        check_rl(config_of(files, tmp_path / "run", overrides=overrides))


def test_the_engine_has_a_slot_for_each_adapter_and_no_more(files, tmp_path):
    def arguments(*overrides):
        return config_of(files, tmp_path / "run", overrides=overrides).engine_arguments(is_cuda=False)

    assert "max_loras" not in arguments(LORA)
    assert arguments(LORA, "rl.keep_adapters={every: 2, last: 3}")["max_loras"] == 4


AGENT = """
import json, urllib.error, urllib.request

def plays(url, key, row):
    def post(path, **asked):
        body = json.dumps(asked).encode() if asked else None
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url + path, body, headers)) as answer:
            return json.load(answer)

    names = [card["id"] for card in post("/models")["data"]]
    asked = {"prompt": row["prompt"], "max_tokens": 5}
    others = [name for name in names if name != "policy"]
    told = {name: post("/completions", model=name, temperature=0, **asked) for name in others}
    assert all(answer["model"] == name for name, answer in told.items())
    texts = {name: answer["choices"][0]["text"] for name, answer in told.items()}
    assert texts["base"] == texts["reference"], texts
    try:
        post("/completions", model="policy@99", **asked)
    except urllib.error.HTTPError as refused:
        text = refused.read().decode()
        assert refused.code == 404 and all(name in text for name in names), text
    else:
        raise AssertionError("policy@99 answered")
    said = post("/completions", **asked)["choices"][0]["text"]
    return {"letters": len(said), "kept": sum(name.startswith("policy@") for name in names)}
"""
TEMPLATE = "ab{completion}c"
JUDGE = f"judge(model='self', adapter='ADAPTER', prompt='{TEMPLATE}', pattern='([0-9])', scale=9)"


def judged(config):
    """Train; return by step the judge's rewards, and scores of the reference adapter's answers."""
    found, engines = [], []
    collect, make = RolloutSource.collect, GroupQueue.__init__

    def note(queue, engine, sampler):
        engines.append(engine)
        make(queue, engine, sampler)

    def look(source, step, timer):
        groups = collect(source, step, timer)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = [reward for group in groups for reward in group.rewards_by_name["judge"].tolist()]
        asked = [
            [{"role": "user", "content": TEMPLATE.format(completion=rollout.policy_text)}]
            for rollout in rollouts
        ]
        answers = engines[0].sample(asked, {"temperature": 0, "max_tokens": 16}, adapter="reference")
        scores = [re.findall("[0-9]", answer.text) for (answer,) in answers]
        found.append((rewards, [float(score[-1]) / 9 if score else None for score in scores]))
        assert all(len(rollout.policy_token_ids) <= 5 for rollout in rollouts), (
            "another model's tokens are trained on"
        )
        return groups

    with (
        mock.patch.object(RolloutSource, "collect", look),
        mock.patch.object(GroupQueue, "__init__", note),
    ):
        reinforce(config)
    return found


@pytest.fixture(scope="module")
def counting(files, tmp_path_factory):
    """Return the files of a run whose model writes digits too."""
    folder = tmp_path_factory.mktemp("counting")
    shutil.copytree(files, folder, dirs_exist_ok=True)
    path = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        str("klmnopqrst".index(token)) if token in "klmnopqrst" else token: number
        for token, number in vocabulary.items()
    }
    path.write_text(json.dumps(tokenizer))
    (folder / "agent.py").write_text(AGENT)
    return folder


def judging(files, output, adapter, *more):
    judge = JUDGE.replace("ADAPTER", adapter)
    rewards = f'rl.rewards={{"{judge}": 1.0, "{files}/rewards.py:letters": 0.1}}'
    agent = f"rl.environment=openai:{files}/agent.py:plays"
    return config_of(files, output, overrides=[*KEEP, "rl.max_steps=3", rewards, agent, *more])


@pytest.mark.slow
def test_a_judge_and_an_agent_ask_the_runs_other_models_by_name(counting, tmp_path):
    for found in forked(judged, judging(counting, tmp_path / "run", "reference")):
        assert len(found) == 3
        for rewards, expected in found:
            assert [None if math.isnan(reward) else reward for reward in rewards] == pytest.approx(expected)
        assert any(value is not None for _, expected in found for value in expected)
    metrics = lines(tmp_path / "run" / "metrics.jsonl")[1:]
    assert [line["logged/kept"] for line in metrics] == [0, 1, 2]


@pytest.mark.slow
def test_a_judge_that_does_not_exist_ends_the_run_with_those_that_do(counting, tmp_path):
    config = judging(counting, tmp_path / "run", "other", "rl.on_reward_error=skip")
    with pytest.raises(RewardError, match=r"'other', only base, policy, reference"):
        reinforce(config)


@pytest.mark.parametrize("section", ["rl", "evaluation"])
@pytest.mark.parametrize(
    ("adapter", "is_kept"), [("reference", True), ("policy@1", False), ("policy@0", False)]
)
def test_a_judge_that_does_not_exist_at_the_first_step_is_refused(files, tmp_path, section, adapter, is_kept):
    rewards = f"{section}.rewards={{\"judge(model='self', adapter='{adapter}')\": 1.0}}"
    config = config_of(files, tmp_path / "run", overrides=[*KEEP, rewards])
    with (
        nullcontext() if is_kept else pytest.raises(ConfigError, match=rf"{section}.rewards.judge.*{adapter}")
    ):
        preflight(config, 1)


@pytest.mark.parametrize(
    ("step", "last", "is_kept"), [(1, 2, False), (2, 2, True), (3, 2, True), (2, 1, False), (4, 2, True)]
)
def test_a_resumed_run_may_ask_an_older_policy_that_is_kept_to_its_end(files, tmp_path, step, last, is_kept):
    keep = f"rl.keep_adapters={{every: 2, last: {last}}}"
    rewards = "rl.rewards={\"judge(model='self', adapter='policy@2')\": 1.0}"
    config = config_of(files, tmp_path / "run", overrides=[LORA, keep, rewards, "rl.max_steps=5"])
    assert (list(older_judge_problems(config, step)) == []) == is_kept


@pytest.mark.parametrize(
    ("reward", "overrides", "setting"),
    [
        ("judge(model='self')", [], "judge"),
        ("judge(model='m')", [], "url"),
        ("judge(model='self', url='http://localhost/v1')", [LORA], "url"),
        ("judge(model='m', url='http://localhost/v1', adapter='base')", [LORA], "adapter"),
    ],
)
@pytest.mark.parametrize("section", ["rl", "evaluation"])
def test_a_judge_that_cannot_be_asked_is_refused_by_name(
    files, tmp_path, section, reward, overrides, setting
):
    rewards = f'{section}.rewards={{"{reward}": 1.0}}'
    with pytest.raises(ConfigError, match=rf"{section}.rewards.*judge.*{setting}"):
        preflight(config_of(files, tmp_path / "run", overrides=[rewards, *overrides]), 1)
