"""Reward functions of every form."""

import asyncio
import math
import sys

import numpy as np
import pytest
import torch

from vectorlm.rl.rewards.runner import Scorable, run_reward
from vectorlm.types import RewardResult


def items(*texts):
    return [Scorable(text, f"ask {index}", (index, 9), {"target": index}) for index, text in enumerate(texts)]


def rewards(outcomes):
    return [outcome.reward for outcome in outcomes]


def test_what_else_there_is_to_know():
    seen = []

    def reward(text, **columns):
        seen.append(columns)
        return 0

    run_reward(reward, items("a"))
    assert seen == [{"prompt": "ask 0", "completion_ids": [0, 9], "target": 0}]


def test_coroutines_run_where_a_loop_runs_already():
    async def reward(text):
        return len(text)

    async def batch(completions):
        if "bad" in completions:
            raise ValueError("no such judge")
        return [len(text) for text in completions]

    async def notebook(function, *texts):
        return run_reward(function, items(*texts))

    assert rewards(asyncio.run(notebook(reward, "abc"))) == [3]
    assert rewards(asyncio.run(notebook(batch, "a", "bb"))) == [1, 2]
    (result,) = asyncio.run(notebook(batch, "bad"))
    assert result.error.startswith("ValueError: no such judge (")


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_none_is_not_an_error_and_an_exception_is(timeout_s):
    def reward(text):
        if text == "bad":
            raise ValueError("no such word")
        return None if text == "skip" else 1.0

    first, second, third = run_reward(reward, items("good", "skip", "bad"), timeout_s)
    assert first == RewardResult(1.0)
    assert math.isnan(second.reward)
    assert second.error is None
    assert math.isnan(third.reward)
    assert third.error.startswith(f"ValueError: no such word ({__file__}:")


def test_a_batch_that_fails_fails_for_all():
    def reward(completions):
        return [1.0]

    found = run_reward(reward, items("a", "b"))
    assert all(
        result.error.startswith("ValueError: it returned 1 rewards for 2 completions") for result in found
    )
    assert [result.is_counted for result in found] == [True, False]


@pytest.mark.parametrize("answer", [{"a": 1.0, "b": 2.0}, "12", b"12", 1.0, None])
def test_what_is_no_list_of_rewards_is_an_error_that_says_what_is(answer):
    for result in run_reward(lambda completions: answer, items("a", "b")):
        assert result.error.startswith("TypeError")
        assert "2 completions" in result.error


@pytest.mark.parametrize("answer", [{"a": 1.0}, [0.5, 1.0], "much", "0.5", b"nan", 1j])
@pytest.mark.parametrize("as_lists", [False, True])
def test_what_is_no_reward_of_one_completion_is_an_error_that_says_what_is(answer, as_lists):
    reward = (lambda completions: [answer] * 3) if as_lists else (lambda completion: answer)
    found = run_reward(reward, items("a", "b", "c"))
    for result in found:
        assert f"a {type(answer).__name__}," in result.error
    assert [outcome.is_counted for outcome in found] == [True, not as_lists, not as_lists]


class Mute(Exception):
    def __str__(self):
        raise ValueError


def test_an_error_without_a_text_is_an_error_all_the_same():
    def reward(completion):
        raise Mute

    (result,) = run_reward(reward, items("a"))
    assert result.error.startswith("Mute: (its text raised ValueError)")


def leave(completion):
    sys.exit(1)


async def leave_later(completion):
    sys.exit(1)


def leave_all(completions):
    sys.exit(1)


@pytest.mark.parametrize("reward", [leave, leave_later, leave_all])
def test_a_reward_that_calls_exit_fails_like_one_that_raises(reward):
    assert [result.error.split(" (")[0] for result in run_reward(reward, items("a", "b"))] == [
        "SystemExit: 1"
    ] * 2


@pytest.mark.parametrize(
    "reward", [math.inf, -math.inf, 1e39, math.nan, np.float32("nan"), torch.tensor(math.nan)]
)
def test_rewards_that_are_not_finite_are_errors(reward):
    for function in (
        lambda text: reward,
        lambda completions: [reward],
        lambda solution_str: {"score": reward},
    ):
        assert run_reward(function, items("a"))[0].error.startswith(f"it returned {float(reward)}")


def test_a_batch_function_sees_the_columns_of_all_items():
    items = [Scorable("a", "", (1,), {}), Scorable("b", "", (1,), {"answer": "b"})]

    def reward(completions, answer):
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    assert [result.reward for result in run_reward(reward, items)] == [0.0, 1.0]


def test_an_answer_of_a_batch_that_is_no_number_is_that_items_error():
    items = [Scorable(text, "", (1,), {}) for text in "ab"]
    wrong, right = run_reward(lambda completions: ["x", 1.0], items)
    assert "TypeError" in wrong.error
    assert right.reward == 1.0


def test_a_coroutines_own_timeout_is_its_own():
    async def reward(completion):
        raise TimeoutError("the judge did not answer")

    for limit in (None, 5.0):
        (found,) = run_reward(reward, [Scorable("a", "", (1,), {})], limit)
        assert found.error.startswith("TimeoutError: the judge did not answer (")


def test_an_object_that_is_called_like_a_coroutine():
    class Judge:
        async def __call__(self, completion):
            return 0.25

    assert run_reward(Judge(), [Scorable("a", "", (1,), {})])[0].reward == 0.25


def test_a_function_that_names_them_gets_turns_messages_and_a_log():
    chat = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}]
    items = [Scorable("say", "ask", (1,), {}, chat, turns, {"won": 1.0}) for turns in (1, 2)]

    def alone(text, messages, num_turns, environment, log):
        log("turns", num_turns)
        log("last", messages[-1]["content"])
        return environment["won"]

    async def later(text, num_turns, log):
        log("turns", num_turns)
        return 1.0

    def together(completions, num_turns, log):
        log("turns", num_turns)
        log("all", 7)
        return [1.0, 1.0]

    first, second = run_reward(alone, items)
    assert (first.reward, first.logged) == (1.0, {"turns": 1.0, "last": "say"})
    assert second.logged["turns"] == 2.0
    assert [result.logged for result in run_reward(later, items)] == [{"turns": 1.0}, {"turns": 2.0}]
    assert run_reward(together, items)[1].logged == {"turns": 2.0, "all": 7.0}


def test_a_column_of_such_a_name_is_the_column_but_for_log():
    item = Scorable("say", "ask", (1,), {"log": 3.0, "num_turns": 3.0})

    def logs(text, log):
        log("seen", 1)
        return 1.0

    def logs_in_lists(completions, log):
        log("seen", 1)
        return [1.0]

    assert run_reward(lambda text, num_turns: num_turns, [item])[0].reward == 3.0
    assert [run_reward(function, [item])[0].logged for function in (logs, logs_in_lists)] == [
        {"seen": 1.0}
    ] * 2
    assert run_reward(lambda text, **columns: columns["log"], [item])[0].reward == 3.0
    assert run_reward(lambda text, **columns: float(len(columns)), [item])[0].reward == 4.0
