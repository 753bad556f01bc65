"""Scoring of rewards: shared among ranks, weighted and summed."""

import asyncio
import math
import os
import pickle
import re
import time
from dataclasses import replace

import pytest
from kit.batches import rollout_of
from kit.rank_processes import on_ranks

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.errors import RewardError
from vectorlm.ranks.topology import Topology
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.rl.evaluation.grade import weighted_sums
from vectorlm.rl.metrics import rollout_metrics
from vectorlm.rl.rewards.scorer import RewardScorer
from vectorlm.rl.rollout import make_batch
from vectorlm.rl.rollouts.sampler import SampledGroup
from vectorlm.rl.settings import CollectSettings
from vectorlm.types import ENVIRONMENT, PromptRecord, RewardResult


def rollouts(*texts):
    return [rollout_of(PromptRecord(f"ask {text}", {"wanted": 2}), text) for text in texts]


def length(text, wanted):
    return float(len(text) - wanted)


def vowels(text):
    if text == "bad":
        raise ValueError("not a word")
    return None if text.isupper() else float(sum(letter in "aeiou" for letter in text))


def scorer_of(functions, topology=None, weights=None, **more):
    return RewardScorer(
        settings=CollectSettings(prompts_per_step=1),
        functions=functions,
        weights=weights or dict.fromkeys(functions, 1.0),
        topology=topology or Topology(),
        **more,
    )


def scorer(topology=None, **more):
    weights = {"length": 1.0, "vowels": 0.5}
    return scorer_of({"length": length, "vowels": vowels}, topology, weights, **more)


def group_of(*texts, greedy=None):
    return SampledGroup(rollouts(*texts), greedy and rollouts(greedy)[0])


def groups_of(*texts):
    """Return groups of one rollout each."""
    return [group_of(text) for text in texts]


def rewards_of(groups):
    return [group.rewards.item() for group in groups]


def test_a_weighted_sum_of_the_rewards():
    first, second = scorer().score(groups_of("aeb", "XYZ"))
    assert (first.rewards.item(), second.rewards.item()) == (1 + 0.5 * 2, 1.0)
    assert first.rewards_by_name["length"].item() == second.rewards_by_name["length"].item() == 1.0
    assert math.isnan(second.rewards_by_name["vowels"])
    assert first.errors == second.errors == ()
    assert first.greedy_reward is None


def test_what_an_environment_gave_is_added_where_its_weight_counts():
    played = [replace(rollout, turn_rewards=(1.0, 0.25)) for rollout in rollouts("aeb", "XYZ", "bad")]
    one = scorer_of({"vowels": vowels}, weights={"vowels": 0.5, ENVIRONMENT: 1.0}, on_error="skip")
    (group,) = one.score([SampledGroup(played)])
    assert group.rewards[:2].tolist() == [2.25, 1.25], "a None takes no other reward along"
    assert group.rewards[2].isnan(), "a function that fails does"
    assert group.rewards_by_name[ENVIRONMENT].tolist() == [1.25] * 3
    (alone,) = scorer_of({"length": length}).score([SampledGroup(played)])
    assert alone.rewards.tolist() == [1.0] * 3
    assert list(alone.rewards_by_name) == ["length"]


def test_rewards_of_a_stored_environment_count_only_with_an_environment():
    played = [
        replace(rollout, num_turns=2, turn_ends=(1, 1), turn_rewards=rewards)
        for rollout, rewards in zip(rollouts("aeb", "XYZ"), [(1.0, 0.0), (0.0, 0.5)], strict=True)
    ]
    spec = get_algorithm("grpo")
    for more, counts in ({}, False), ({ENVIRONMENT: 1.0}, True):
        weights = {"length": 1.0, **more}
        one = scorer_of({"length": length}, weights=weights, drops_constant_groups=True)
        (group,) = one.score([SampledGroup(played)])
        assert group.is_dropped is not counts
        batch = make_batch([replace(group, is_dropped=False)], spec)
        assert spec.advantages(batch, spec.settings).any() == counts


def test_completions_for_which_no_reward_counts_have_0():
    mixed = [
        replace(rollout, prompt_record=PromptRecord("a", {"wanted": 2}, "b")) for rollout in rollouts("aeb")
    ]
    (group,) = scorer_of({"length": length}, of_source={"b": {}}).score([SampledGroup(mixed)])
    assert group.rewards.tolist() == [0.0]


def test_a_greedy_completion_is_scored_beside_its_group():
    groups = [group_of("aa", "bbb", greedy="eeee"), group_of("c", "dd", greedy="bad")]
    first, second = scorer(on_error="skip").score(groups)
    assert first.rewards.tolist() == [0.0 + 1.0, 1.0]
    assert first.greedy_reward.item() == 2.0 + 2.0
    assert second.greedy_reward.isnan()
    assert (len(first.errors), len(second.errors)) == (0, 1)


def test_a_function_that_fails_stops_the_run_and_says_what_it_was_shown():
    with pytest.raises(
        RewardError,
        match=r"'vowels' failed: ValueError: not a word \(.*py:\d+\) \(prompt 'ask bad', completion 'bad'\)",
    ):
        scorer().score(groups_of("a", "bad"))


def test_or_its_completion_is_skipped_and_counted():
    first, second = scorer(on_error="skip").score(groups_of("a", "bad"))
    assert not first.rewards.isnan()
    assert second.rewards.isnan()
    assert first.errors == ()
    (error,) = second.errors
    assert "'ask bad'" in error


@pytest.mark.parametrize("answer", [1.0, ["much", "a", 1.0]])
def test_a_call_for_several_completions_that_fails_is_one_error(answer):
    quiet = scorer_of({"all": lambda completions: answer}, on_error="skip")
    first, second = quiet.score([*groups_of("a", "b"), group_of("c")])[:2]
    assert first.rewards.isnan()
    assert second.rewards.isnan()
    assert (len(first.errors), len(second.errors)) == (1, 0)


def test_what_functions_log_is_the_rollouts_and_its_numbers_are_metrics():
    def alone(text, log, num_turns):
        log("turns", num_turns)
        log("word", text)
        return 1.0

    def lists(completions, log):
        log("size", list(map(len, completions)))
        return [1.0] * len(completions)

    first, second = scorer_of({"alone": alone, "lists": lists}).score(groups_of("a", "bcd"))
    assert first.logged == ({"turns": 1.0, "word": "a", "size": 1.0},)
    assert second.logged == ({"turns": 1.0, "word": "bcd", "size": 3.0},)
    metrics = rollout_metrics([first, second], step=0)
    assert {name: value for name, value in metrics.items() if name.startswith("logged/")} == {
        "logged/turns": 1.0,
        "logged/size": 2.0,
    }


def test_a_completion_that_no_function_scores_has_no_reward():
    (group,) = scorer_of({"none": lambda text: None}).score(groups_of("a"))
    assert group.rewards.isnan().tolist() == [True]


def crash(text):
    raise ValueError("it cannot measure this")


@pytest.mark.parametrize("measure", [lambda text: 1.0, lambda text: None, crash])
def test_a_reward_of_weight_0_changes_no_sum(measure):
    scores = {"a": 0.5, "b": None}
    functions = {"scores": scores.get, "measured": measure}
    one = scorer_of(functions, weights={"scores": 2.0, "measured": 0.0}, on_error="skip")
    (group,) = one.score([group_of("a", "b")])
    assert group.rewards.tolist() == pytest.approx([1.0, math.nan], nan_ok=True)
    assert len(group.errors) == 2 * (measure is crash)
    results = [
        [[RewardResult(value) for value in found.tolist()]] for found in group.rewards_by_name.values()
    ]
    sums = weighted_sums(results, list(group.reward_weights.values()))
    assert [result.reward for result in sums[0]] == pytest.approx(group.rewards.tolist(), nan_ok=True)
    batch = make_batch([group], get_algorithm("gdpo"))
    assert batch is None or batch.valid.tolist() == [[True, False]]


def test_the_sum_is_0_if_all_weights_are():
    functions = {"none": lambda text: None, "one": lambda text: 1.0}
    (group,) = scorer_of(functions, weights=dict.fromkeys(functions, 0.0)).score([group_of("a")])
    assert group.rewards.tolist() == [0.0]
    ((total,),) = weighted_sums([[[RewardResult(math.nan)]], [[RewardResult(1.0)]]], [0.0, 0.0])
    assert total.reward == 0.0


def compare_on_rank(topology):
    groups = [
        SampledGroup([rollout_of(record, text) for text in texts])
        for record, texts in ((PromptRecord("one"), "abc"), (PromptRecord("two"), "dd"))
    ]

    def rank(completions, prompts):
        return [float(sum(other == prompt for other in prompts)) for prompt in prompts]

    return [group.rewards.tolist() for group in scorer_of({"rank": rank}, topology).score(groups)]


@pytest.mark.slow
def test_a_function_of_a_batch_sees_whole_groups_on_any_number_of_ranks():
    assert on_ranks(1, compare_on_rank) == [[[3.0, 3.0, 3.0], [2.0, 2.0]]]
    assert on_ranks(2, compare_on_rank) == [[[3.0, 3.0, 3.0], [2.0, 2.0]]] * 2


def score_on_rank(topology):
    seen = []

    def noted(text, wanted):
        seen.append(text)
        return length(text, wanted)

    def noting(model):
        return [float(len(rollout.text)) for rollout in model]

    weights = {"length": 1.0, "model": 10.0}
    here = scorer_of({"length": noted}, topology, weights, models={"model": noting})
    try:
        scorer(topology).score(groups_of("a", "bad"))
        error = None
    except RewardError as caught:
        error = str(caught)
    return rewards_of(here.score(groups_of("a", "bb", "ccc"))), seen, error


def test_a_group_whose_reward_fails_ends_the_run_before_the_others_end():
    """The other calls may hang until their time limit."""

    def refuses(text):
        raise ArithmeticError("no")

    with (
        WorkerPool(1) as pool,
        pytest.raises(RewardError, match="the reward 'refuses' failed: ArithmeticError: no"),
    ):
        asyncio.run(scorer_of({"refuses": refuses}, pool=pool).score_group(rollouts("ab")))


def score_early_on_rank(topology):
    """Return the scores of two groups with greedy completions, scored group by group and all at the end."""

    async def judged(text, log):
        log("judged", len(text))
        return None if text.isupper() else float("e" in text)

    def compared(completions):
        return [float(len(completions))] * len(completions)

    def counted(text, wanted):
        if text == "bad":
            raise ValueError("not a word")
        return float(len(text) - wanted)

    functions = {"compared": compared, "judged": judged, "counted": counted}
    weights = {"compared": 0.25, "judged": 1.0, "counted": 0.5}
    groups = [group_of("aeb", "XYZ", greedy="e"), group_of("bad", "ee", greedy="dd")]
    with WorkerPool(2) as pool:
        mine = scorer_of(functions, topology, weights, pool=pool, on_error="skip")
        ended = [
            replace(group, results=asyncio.run(mine.score_group([*group.rollouts, group.greedy])))
            for group in groups
        ]
        early = mine.score(ended)
        late = mine.score(groups)
    return [sorted(group.results) for group in ended], *(
        [
            (
                group.rewards.tolist(),
                group.greedy_reward.item(),
                group.errors,
                group.logged,
                list(group.rewards_by_name),
            )
            for group in scored
        ]
        for scored in (early, late)
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_that_are_scored_as_they_end_have_the_rewards_of_the_whole_step(world_size):
    for names, early, late in on_ranks(world_size, score_early_on_rank):
        # A function of lists sees the groups of a whole step.
        assert names == [["counted", "judged"]] * 2
        assert repr(early) == repr(late)
        lists = {1: 6, 2: 4}[world_size]
        assert early[0][0] == [0.25 * lists + 1.0 + 0.5, 0.25 * lists + 0.5]


def fail_on_the_last_rank(topology):
    """Return the results of rewards that hang and that exit, with `on_error` set to skip and to stop."""

    # Functions inside a function are pickled by value, which spares workers the import of this file and of torch.
    def hang(text):
        if text == "bad":
            re.match("(a+)+b", "a" * 40)
        return 1.0

    def leave(text):
        if text == "bad":
            os._exit(3)
        return 1.0

    found = []
    with WorkerPool(2) as pool:
        for reward in (hang, leave):
            for on_error in ("skip", "stop"):
                scorer = scorer_of({"mine": reward}, topology, pool=pool, timeout_s=0.5, on_error=on_error)
                start = time.monotonic()
                try:
                    said = rewards_of(scorer.score(groups_of("a", "b", "bad", "d")))
                except RewardError as error:
                    said = str(error)
                found.append((said, time.monotonic() - start))
    return found


def test_a_reward_that_never_returns_is_an_error_on_every_rank_or_left_out():
    errors = ("no answer within 0.5 s", "its process ended with exit code 3")
    for found in on_ranks(2, fail_on_the_last_rank):
        for (rewards, _), (text, seconds), error in zip(found[::2], found[1::2], errors, strict=True):
            assert rewards == pytest.approx([1.0, 1.0, math.nan, 1.0], nan_ok=True)
            assert text.startswith(f"the reward 'mine' failed: {error} (prompt 'ask bad', completion 'bad')")
            assert seconds < 30


def test_ranks_share_the_calls_and_all_know_all_rewards_and_errors():
    (first, seen, error), (second, seen_too, error_too) = on_ranks(2, score_on_rank)
    assert first == second == [9.0, 20.0, 31.0]
    assert (seen, seen_too) == (["a"], ["bb", "ccc"])
    assert error == error_too
    assert "not a word" in error


def score_by_source(topology):
    mine = scorer(topology, of_source={"a": {"length": 2.0}, "b": {"length": 1.0, "vowels": 1.0}})
    groups = [
        SampledGroup(
            [
                replace(rollout, prompt_record=replace(rollout.prompt_record, source=source))
                for rollout in group.rollouts
            ]
        )
        for group, source in zip(groups_of("aeb", "XYZ", "bad", "aaa"), ("a", "b", "a", ""), strict=True)
    ]
    return mine.score(groups)


def score_two_groups_of_one_prompt(topology):
    record = PromptRecord("ask", {"wanted": 2})
    asked_twice = [
        [replace(rollout, prompt_record=record) for rollout in rollouts("a", "bb", "ccc")] for _ in "12"
    ]
    groups = [*map(SampledGroup, asked_twice), group_of("d", "ee", "fff")]
    if not topology.is_main:
        # Another rank receives groups one at a time.
        groups = [pickle.loads(pickle.dumps(group)) for group in groups]
    return [group.rewards.tolist() for group in scorer(topology).score(groups)]


def test_ranks_share_the_work_alike_though_two_groups_have_one_prompt():
    expected = [
        group.rewards.tolist()
        for group in scorer().score(
            [group_of("a", "bb", "ccc"), group_of("a", "bb", "ccc"), group_of("d", "ee", "fff")]
        )
    ]
    assert on_ranks(2, score_two_groups_of_one_prompt) == [expected] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_prompts_of_a_source_have_its_own_rewards_and_weights(world_size):
    # The text "bad" makes `vowels` raise, and its source does not have that reward.
    first, second, third, fourth = on_ranks(world_size, score_by_source)[0]
    assert rewards_of([first, second, third, fourth]) == [2.0, 1.0, 2.0, 1 + 0.5 * 3]
    assert list(first.rewards_by_name) == ["length"]
    assert dict(second.reward_weights) == {"length": 1.0, "vowels": 1.0}
    metrics = rollout_metrics([first, second, third], 0)
    assert metrics["source/a/reward/mean"] == 2.0
    assert metrics["source/b/rollout/groups"] == 1.0
    assert metrics["reward/length/mean"] == 1.0
    assert not any(name.startswith("source/") for name in rollout_metrics([fourth], 0))
