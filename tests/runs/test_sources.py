"""Runs with several sources of prompts and a curriculum, and their refused settings."""

import json

import pytest
from kit.rank_processes import forked, save_tiny_llama
from kit.rl_runs import ONE_AT_A_TIME, config_of, cut_after_step_2, lines, numbers, save_files

from vectorlm.errors import ConfigError
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.preflight.rl import rl_problems
from vectorlm.runs.reinforcement import origin_of, reinforce

TASK = {"reasoning_gym": "letter_counting", "form": "text", "config": {"max_words": 5}}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = save_files(tmp_path_factory.mktemp("files"))
    save_tiny_llama(folder / "model", hidden_size=64, max_length=256)
    return folder


def overrides_of(files, **sources):
    rewards = str(files / "rewards.py")
    given = {
        "letters": {
            "prompts": str(files / "questions.jsonl"),
            "rewards": {f"{rewards}:letters": 1.0},
            "held_out": str(files / "questions.jsonl"),
        },
        "tasks": {
            "prompts": {**TASK, "curriculum": {"rise_above": 0.01, "fall_below": 0.0, "num_groups": 4}},
            "rewards": {"reasoning_gym": 0.5, f"{rewards}:vowels": 1.0},
            "held_out": {**TASK, "size": 4},
        },
    }
    given = {name: {**source, **sources.get(name, {})} for name, source in given.items()}
    return [
        "rl.prompts=null",
        f"rl.sources={json.dumps(given)}",
        "rl.rewards={}",
        "train_parameters.max_seq_len=256",
        "engine.max_model_len=256",
        "rl.max_tokens_per_micro_batch=256",
        *ONE_AT_A_TIME,
    ]


@pytest.mark.parametrize("form", ["{folder}/own.py:{name}", "own_module:{name}"])
def test_the_origin_of_rollouts_follows_rewards_environments_and_sampling(files, tmp_path, monkeypatch, form):
    monkeypatch.syspath_prepend(tmp_path)
    names = [form.format(folder=tmp_path, name=name) for name in ("reward", "Game")]
    given = [f"rl.rewards={json.dumps({names[0]: 1.0})}", f"rl.environment={names[1]}"]

    def origin(text, *overrides):
        for path in (tmp_path / "own.py", tmp_path / "own_module.py"):
            path.write_text(text)
        config = config_of(files, tmp_path / "out", overrides=[*given, *overrides])
        return origin_of(config, config.rl)

    first = origin("old")
    assert origin("old", "rl.max_steps=9", "rl.max_tokens_per_micro_batch=9000") == first
    assert str(tmp_path) not in first
    changes = [
        "rl.environment=null",
        'rl.rewards={"exact_match": 1.0}',
        "rl.max_turns=2",
        "rl.sampling_params.temperature=0.5",
        'rl.sampling_params.structured_outputs={"regex": "a+"}',
        "engine.max_model_len=20",
    ]
    others = [origin("new"), *(origin("old", change) for change in changes)]
    assert len({first, *others}) == 8


@pytest.mark.slow
def test_a_run_on_two_sources_goes_on_bit_for_bit_from_a_checkpoint(files, tmp_path):
    pytest.importorskip("reasoning_gym", reason="the package reasoning_gym is not installed")
    whole = config_of(files, tmp_path / "whole", overrides=overrides_of(files))
    forked(reinforce, whole)
    cut_after_step_2(tmp_path / "whole", tmp_path / "cut")
    forked(reinforce, config_of(files, tmp_path / "cut", overrides=overrides_of(files)))
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    rollouts = lines(tmp_path / "whole" / "rollouts.jsonl")
    assert lines(tmp_path / "cut" / "rollouts.jsonl") == rollouts
    by_step = [
        {rollout["group"]: rollout["source"] for rollout in rollouts if rollout["train_step"] == step}
        for step in (1, 4)
    ]
    assert [sorted(sources.values()) for sources in by_step] == [["letters"] * 2 + ["tasks"] * 2] * 2
    assert {tuple(rollout["rewards"]) for rollout in rollouts} == {("letters",), ("reasoning_gym", "vowels")}
    last = numbers(tmp_path / "whole")[-1]
    assert {"source/letters/reward/mean", "source/tasks/reward/mean", "curriculum/level"} <= last.keys()
    assert {"eval/accuracy", "eval/accuracy/letters", "eval/accuracy/tasks"} <= last.keys()
    assert len(lines(tmp_path / "whole" / "samples.jsonl")) == (8 + 8 + 4) * 3


@pytest.mark.parametrize(
    ("sources", "text"),
    [
        ({"letters": {"weight": 0.5}, "tasks": {"weight": 0.3}}, "letters 0.5, tasks 0.3"),
        ({"letters": {"weight": 0.5}}, "rl.sources"),
        ({"letters": {"weight": -0.5}}, "rl.sources.letters.weight=-0.5"),
        ({"letters": {"wight": 0.5}}, "'rl.sources.letters.wight'"),
        ({"letters": {"rewards": {}}}, "rl.sources.letters.rewards"),
        ({"tasks": {"prompts": "reasoning_gym:chain_sun"}}, "'chain_sum'"),
        ({"tasks": {"rewards": {"reasoning_gim": 1}}}, "'reasoning_gym'"),
        ({"tasks": {"rewards": {"math": 1}}}, "rl.sources.tasks.rewards"),
        ({"letters": {"rewards": {"reasoning_gym": 1}}}, "rl.sources.letters.rewards.reasoning_gym=1"),
        ({"tasks": {"held_out": {**TASK, "seed": 99}}}, "rl.sources.tasks.held_out.seed=99"),
        ({"letters": {"held_out": "absent.jsonl"}}, "rl.sources.letters.held_out='absent.jsonl'"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_source_is_said_before_anything_starts(files, tmp_path, sources, text):
    pytest.importorskip("reasoning_gym", reason="the package reasoning_gym is not installed")
    with pytest.raises(ConfigError) as error:
        preflight(config_of(files, tmp_path / "out", overrides=overrides_of(files, **sources)), 1)
    assert text in str(error.value)


def test_prompts_and_sources_exclude_each_other(files, tmp_path):
    for overrides in (
        ["rl.prompts=null"],
        [change for change in overrides_of(files) if change != "rl.prompts=null"],
    ):
        with pytest.raises(ConfigError, match="'prompts' or 'sources'"):
            preflight(config_of(files, tmp_path / "out", overrides=overrides), 1)


@pytest.mark.parametrize("environments", [(None, None), ("a.py:Game", None), ("a.py:Game", "b.py:Game")])
def test_rewards_that_are_compared_alone_must_be_those_of_all_sources(files, tmp_path, environments):
    given = {
        f"source{place}": {"prompts": ["a"], "rewards": {"format": 1.0}, "environment": name}
        for place, name in enumerate(environments)
    }
    config = config_of(
        files, tmp_path / "out", "gdpo", ["rl.prompts=null", f"rl.sources={json.dumps(given)}"]
    )
    problems = [problem for problem in rl_problems(config, config.rl) if "compares each reward" in problem]
    assert len(problems) == (None in environments and any(environments))
