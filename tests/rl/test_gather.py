"""Rollouts of a step: groups, seeds, dynamic sampling, penalties for length, turns with an environment."""

import math
from dataclasses import replace

import pytest
import torch
from gatherers import gatherer
from rank_processes import on_ranks

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.data.questions import Question
from vectorlm.errors import RolloutError
from vectorlm.rl.metrics import rollout_metrics
from vectorlm.rollout.replay import Replay
from vectorlm.rollout.rollout import Rollout
from vectorlm.telemetry.timers import Timer
from vectorlm.types import Completion


class Echo:
    """Answers by script, and keeps what it was asked; tokens are letters."""

    def __init__(self, script):
        self.script, self.calls = script, []

    def sample(self, prompts, params):
        self.calls.append((list(prompts), list(params) if isinstance(params, list) else params))
        each = params if isinstance(params, list) else [params] * len(prompts)
        return [
            [self.completion(prompt, index) for index in range(options["n"])]
            for prompt, options in zip(prompts, each, strict=True)
        ]

    def completion(self, prompt, index):
        text = self.script(prompt, index)
        ids = tuple(map(ord, prompt)) if isinstance(prompt, str) else tuple(prompt)
        reason = "length" if text.endswith("…") else "stop"
        return Completion(ids, tuple(map(ord, text)), (-0.5,) * len(text), (4,) * len(text), text, reason)


def test_every_prompt_has_a_seed_of_its_own_that_its_place_and_the_run_decide():
    engine = Echo(lambda prompt, index: "ab"[index])
    mine = gatherer(engine, lambda text: float(text == "a"))
    found = mine.gather(7, Timer())
    ((prompts, params),) = engine.calls
    assert [group[0].question.prompt for group in found.groups] == prompts
    assert found.rewards.tolist() == [[1.0, 0.0]] * 3
    seeds = [each["seed"] for each in params]
    assert len(set(seeds)) == 3
    assert all(each["n"] == 2 and each["logprobs"] == 0 for each in params)
    mine.gather(8, Timer())
    assert set(seeds).isdisjoint(each["seed"] for each in engine.calls[1][1])
    again = Echo(engine.script)
    gatherer(again, lambda text: 1.0).gather(7, Timer())
    assert again.calls == engine.calls[:1]


def test_dynamic_sampling_replaces_groups_of_equal_rewards():
    engine = Echo(lambda prompt, index: f"{prompt}{index}")
    # Questions with an even number are always right, whoever answers.
    mine = gatherer(
        engine,
        lambda text, index: float(index % 2 == 0 or text.endswith("0")),
        drops_constant_groups=True,
        max_rounds=6,
        num_groups=6,
    )
    found = mine.gather(0, Timer())
    assert len(found.groups) == 6
    assert found.rewards.tolist() == [[1.0, 0.0]] * 6
    assert found.num_sampled_groups > 6
    assert len(found.sampled.groups) == found.num_sampled_groups
    metrics = rollout_metrics(found, 0)
    assert metrics["rollout/groups"] == 6
    share = found.sampled.rewards.mean().item()
    assert share > 0.5, "dropped groups were sampled too"
    assert metrics["reward/mean"] == pytest.approx(share)
    assert len({params[0]["seed"] for _, params in engine.calls}) == len(engine.calls)
    assert mine.order.position == found.num_sampled_groups


def test_dynamic_sampling_gives_up_after_its_rounds():
    mine = gatherer(
        Echo(lambda prompt, index: "x"), lambda text: 1.0, drops_constant_groups=True, max_rounds=3
    )
    found = mine.gather(0, Timer())
    assert found.groups == []
    assert found.num_sampled_groups == 9
    assert found.chosen(get_algorithm("dapo"), 0, False) is None


def test_long_completions_lose_more_the_longer_they_are():
    lengths = {0: 6, 1: 8, 2: 10}
    engine = Echo(lambda prompt, index: "x" * lengths[index])
    mine = gatherer(
        engine, lambda text: 1.0, group_size=3, max_tokens=10, overlong_buffer=4, overlong_penalty=2.0
    )
    assert mine.gather(0, Timer()).rewards[0].tolist() == [1.0, 0.0, -1.0]


def test_greedy_completions_are_scored_apart():
    engine = Echo(lambda prompt, index: "a" * (index + 1))
    found = gatherer(engine, lambda text: float(len(text)), needs_greedy=True).gather(0, Timer())
    assert found.greedy_rewards.tolist() == [1.0] * 3
    cut = gatherer(
        engine, lambda text: float(len(text)), needs_greedy=True, max_tokens=1, overlong_buffer=1
    ).gather(0, Timer())
    assert cut.greedy_rewards.tolist() == cut.rewards[:, 0].tolist() == [0.0] * 3, "a penalty spares nobody"
    assert engine.calls[1][1] == [{"logprobs": 0, "temperature": 0.0, "max_tokens": 10, "n": 1}] * 3


def test_cut_completions_stay_in_the_baseline_and_leave_the_loss():
    engine = Echo(lambda prompt, index: "abc…" if index else "abc")
    found = gatherer(engine, lambda text: float(text == "abc")).gather(0, Timer())
    batch = found.chosen(get_algorithm("grpo"), 0, True)
    assert batch.mask.any(dim=1).tolist() == [True, False] * 3
    assert batch.valid.all()
    assert found.chosen(get_algorithm("grpo"), 0, False).mask.any(dim=1).all()


def test_the_best_and_the_worst_of_a_group_are_chosen_in_this_order():
    engine = Echo(lambda prompt, index: "abcd"[index])
    rewards = {"a": 0.5, "b": 0.1, "c": math.nan, "d": 0.9}
    found = gatherer(
        engine, lambda text: None if text == "c" else rewards[text], group_size=4, num_groups=1
    ).gather(0, Timer())
    batch = found.chosen(get_algorithm("online_dpo"), 0, False)
    assert batch.columns.tolist() == [[3, 1]]
    torch.testing.assert_close(batch.rewards, torch.tensor([[0.9, 0.1]]))
    assert found.chosen(get_algorithm("best_of_k"), 0, False).columns.tolist() == [[3]]


def test_what_was_cut_is_not_chosen_where_cut_completions_are_left_out():
    engine = Echo(lambda prompt, index: ["a", "bb…", "ccc", "dddd…"][index])
    found = gatherer(engine, lambda text: float(len(text)), group_size=4, num_groups=1).gather(0, Timer())
    assert found.chosen(get_algorithm("online_dpo"), 0, False).columns.tolist() == [[3, 0]]
    batch = found.chosen(get_algorithm("online_dpo"), 0, True)
    assert batch.columns.tolist() == [[2, 0]]
    assert batch.mask.any(dim=1).all(), "a pair has two halves"
    assert found.chosen(get_algorithm("best_of_k"), 0, True).columns.tolist() == [[2]]


class Calculator:
    """Answers sums, and ends when it is told so."""

    def __init__(self, index):
        self.index = index

    def respond(self, text):
        return None if text == "done" else f"={len(text) + self.index};"


def test_turns_with_an_environment_are_one_rollout_in_which_its_words_are_not_the_policys():
    said = {0: "1+1", 1: "done"}
    engine = Echo(lambda prompt, index: said[index] if isinstance(prompt, str) else "done")
    mine = gatherer(
        engine,
        lambda text: float(text.count("done")),
        num_groups=1,
        collector={"make_environment": Calculator, "max_turns": 4},
    )
    ((talked, silent),) = mine.gather(0, Timer()).groups
    reply = f"={3 + talked.question.columns['index']};"
    assert talked.text == f"1+1{reply}done"
    assert talked.num_turns == 2
    assert talked.token_ids == tuple(map(ord, talked.text))
    gap = len(reply)
    assert talked.policy_mask == (True,) * 3 + (False,) * gap + (True,) * 4
    assert talked.sampler_logprobs == (-0.5,) * 3 + (0.0,) * gap + (-0.5,) * 4
    assert talked.versions == (4,) * 3 + (-1,) * gap + (4,) * 4
    assert (silent.text, silent.num_turns) == ("done", 1)
    (prompt,), _ = engine.calls[1]
    assert prompt == [*map(ord, talked.question.prompt), *map(ord, f"1+1{reply}")]


def test_a_conversation_ends_after_its_turns_where_it_is_cut_and_where_there_is_no_room():
    def turns(script, **collector):
        mine = gatherer(
            Echo(script),
            lambda text: 1.0,
            num_groups=1,
            group_size=1,
            collector={"make_environment": Calculator, **collector},
        )
        return mine.gather(0, Timer()).groups[0][0].num_turns

    assert turns(lambda prompt, index: "more", max_turns=3) == 3
    assert turns(lambda prompt, index: "cut…", max_turns=3) == 1
    assert turns(lambda prompt, index: "x" * 60, max_turns=3) == 2


@pytest.mark.parametrize("name", ["grpo", "online_dpo", "best_of_k"])
def test_a_group_that_nobody_could_score_is_not_trained_on(name):
    found = gatherer(Echo(lambda prompt, index: "x"), lambda text: None).gather(0, Timer())
    assert found.chosen(get_algorithm(name), 0, False) is None


def converse_on_rank(topology, breaks):
    asked = []

    class Noting(Calculator):
        def respond(self, text):
            asked.append(self.index)
            if breaks and self.index == breaks:
                raise OSError("no such tool")
            return super().respond(text)

    mine = gatherer(
        Echo(lambda prompt, index: "1+1" if isinstance(prompt, str) else "done"),
        lambda text: 1.0,
        num_groups=4,
        group_size=1,
        num_questions=4,
        collector={"make_environment": Noting, "max_turns": 4, "topology": topology},
    )
    mine = replace(mine, scorer=replace(mine.scorer, topology=topology))
    try:
        return [group[0].text for group in mine.gather(0, Timer()).groups], asked
    except RolloutError as error:
        return str(error), asked


def test_each_environment_lives_on_one_rank_and_all_ranks_read_its_replies():
    (texts, asked), (texts_too, asked_too) = on_ranks(2, converse_on_rank, None)
    assert texts == texts_too
    assert all(text.startswith("1+1=") for text in texts)
    # Each is asked twice: after the sum and after "done".
    assert sorted(asked + asked_too) == sorted([0, 1, 2, 3] * 2)
    assert len(asked) == len(asked_too) == 4


def test_an_environment_that_fails_ends_the_run_on_all_ranks_with_its_prompt():
    (error, _), (error_too, _) = on_ranks(2, converse_on_rank, 3)
    assert error == error_too
    assert "the environment failed: OSError: no such tool (prompt 'q3', after '1+1')" in error


def test_stored_groups_take_their_share_of_each_step():
    stored = [
        [
            Rollout(
                Question(f"old{group}", {"index": 0}),
                (1,),
                (2,),
                (True,),
                (-1.0,),
                (0,),
                "s",
                "stop",
                is_replayed=True,
            )
        ]
        * 2
        for group in range(3)
    ]
    engine = Echo(lambda prompt, index: "ab"[index])
    mine = gatherer(
        engine, lambda text: float(text == "a"), num_groups=4, replay=Replay(stored, 2, 0), replayed_share=0.5
    )
    found = mine.gather(0, Timer())
    prompts = [group[0].question.prompt for group in found.groups]
    assert [prompt.startswith("old") for prompt in prompts] == [False, False, True, True]
    assert engine.calls[0][0] == prompts[:2]
    assert rollout_metrics(found, 9)["rollout/replayed"] == 0.5
    assert rollout_metrics(found, 9)["staleness/token_max"] == 5.0
    alone = gatherer(engine, lambda text: 1.0, num_groups=3, replay=Replay(stored, 2, 0), replayed_share=1.0)
    assert len(alone.gather(0, Timer()).groups) == 3
    assert len(engine.calls) == 1, "nothing was sampled"
