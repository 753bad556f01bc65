"""Rewards shared out over ranks, weighed and added up."""

import math

import pytest
from rank_processes import on_ranks

from vectorlm.data.questions import Question
from vectorlm.errors import RewardError
from vectorlm.ranks.topology import Topology
from vectorlm.rl.scorer import Scorer
from vectorlm.rollout.rollout import Rollout


def rollouts(*texts):
    return [
        Rollout(Question(f"ask {text}", {"wanted": 2}), (2,), (3,), (True,), (0.0,), (0,), text, "stop")
        for text in texts
    ]


def length(text, wanted):
    return float(len(text) - wanted)


def vowels(text):
    if text == "bad":
        raise ValueError("not a word")
    return None if text.isupper() else float(sum(letter in "aeiou" for letter in text))


def scorer(topology=None, **more):
    topology = topology or Topology()
    functions = {"length": length, "vowels": vowels}
    return Scorer(functions=functions, weights={"length": 1.0, "vowels": 0.5}, topology=topology, **more)


def test_a_weighted_sum_of_what_was_said():
    scored = scorer().score(rollouts("aeb", "XYZ"))
    assert scored.total.tolist() == [1 + 0.5 * 2, 1.0]
    assert scored.parts["length"].tolist() == [1.0, 1.0]
    assert math.isnan(scored.parts["vowels"][1])
    assert scored.num_errors == 0


def test_a_function_that_fails_stops_the_run_and_says_what_it_was_shown():
    with pytest.raises(
        RewardError, match=r"'vowels' failed: ValueError: not a word \(prompt 'ask bad', completion 'bad'\)"
    ):
        scorer().score(rollouts("a", "bad"))


def test_or_its_completion_is_skipped_and_counted():
    scored = scorer(on_error="skip").score(rollouts("a", "bad"))
    assert scored.total.isnan().tolist() == [False, True]
    assert scored.num_errors == 1
    assert "'ask bad'" in scored.first_error


def test_nothing_said_by_anybody_is_no_reward():
    quiet = Scorer(functions={"none": lambda text: None}, weights={"none": 1.0}, topology=Topology())
    assert quiet.score(rollouts("a")).total.isnan().tolist() == [True]


def compare_on_rank(topology):
    question, other = Question("one"), Question("two")
    groups = [
        Rollout(asked, (2,), (3,), (True,), (0.0,), (0,), text, "stop")
        for asked, texts in ((question, "abc"), (other, "dd"))
        for text in texts
    ]

    def rank(completions, prompts):
        return [float(sum(other == prompt for other in prompts)) for prompt in prompts]

    return (
        Scorer(functions={"rank": rank}, weights={"rank": 1.0}, topology=topology)
        .score(groups)
        .total.tolist()
    )


def test_a_function_of_a_batch_sees_whole_groups_on_any_number_of_ranks():
    assert on_ranks(1, compare_on_rank) == [[3.0, 3.0, 3.0, 2.0, 2.0]]
    assert on_ranks(2, compare_on_rank) == [[3.0, 3.0, 3.0, 2.0, 2.0]] * 2


def score_on_rank(topology):
    seen = []

    def noted(text, wanted):
        seen.append(text)
        return length(text, wanted)

    def noting(model):
        return [float(len(each.text)) for each in model]

    here = Scorer(
        functions={"length": noted},
        weights={"length": 1.0, "model": 10.0},
        models={"model": noting},
        topology=topology,
    )
    try:
        scorer(topology).score(rollouts("a", "bad"))
        error = None
    except RewardError as caught:
        error = str(caught)
    return here.score(rollouts("a", "bb", "ccc")).total, seen, error


def test_ranks_share_the_calls_and_all_know_all_rewards_and_errors():
    (first, seen, error), (second, seen_too, error_too) = on_ranks(2, score_on_rank)
    assert first.tolist() == second.tolist() == [9.0, 20.0, 31.0]
    assert (seen, seen_too) == (["a"], ["bb", "ccc"])
    assert error == error_too
    assert "not a word" in error
