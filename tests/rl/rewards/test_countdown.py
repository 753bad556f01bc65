"""The Countdown reward and its place in the registry."""

import pytest

from vectorlm.errors import ConfigError
from vectorlm.rl.rewards.countdown import countdown_reward
from vectorlm.rl.rewards.registry import get_reward, reward_names


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" <answer>3+8-5</answer>", 1.0),
        (" <answer>8-5+3</answer>", 1.0),
        ("so\n<answer>\n  (8 - 5) + 3\n</answer>\n\n", 1.0),
        ("<answer>3+8+5</answer>", 0.1),
        ("<answer>8-2</answer>", 0.1),
        ("<answer>6</answer>", 0.1),
        ("<answer>3+8-5+0</answer>", 0.1),
        ("<answer>3+3+5+8-5-8</answer>", 0.1),
        ("<answer>banana</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("<answer>3+8-5=6</answer>", 0.1),
        ("<answer>8/(3-3)</answer>", 0.1),
        ("", 0.0),
        ("3+8-5", 0.0),
        ("<answer>3+8-5", 0.0),
        ("3+8-5</answer>", 0.0),
        ("</answer>3+8-5<answer>", 0.0),
    ],
)
def test_a_completion_earns_what_its_answer_is_worth(completion, reward):
    assert countdown_reward(completion, numbers=[3, 5, 8], target=6) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<answer>3+8+5</answer> no: <answer>3+8-5</answer>", 1.0),
        ("<answer>3+8-5</answer> or <answer>3+8+5</answer>", 0.1),
        ("<answer>3+8-5</answer> or <answer>3+", 1.0),
        ("<answer>no <answer>3+8-5</answer>", 1.0),
        ("<answer>3+8-5</answer></answer>", 1.0),
    ],
)
def test_the_last_complete_answer_counts(completion, reward):
    assert countdown_reward(completion, numbers=[3, 5, 8], target=6) == reward


def test_a_repeated_number_must_be_used_as_often_as_it_is_given():
    assert countdown_reward("<answer>4+4+2</answer>", numbers=[4, 2, 4], target=10) == 1.0
    assert countdown_reward("<answer>2*4+2</answer>", numbers=[4, 2, 4], target=10) == 0.1


def test_fractions_are_exact():
    assert countdown_reward("<answer>(1/3)*9</answer>", numbers=[1, 3, 9], target=3) == 1.0
    assert countdown_reward("<answer>10/3</answer>", numbers=[10, 3], target=3) == 0.1


def test_a_hostile_answer_is_neither_run_nor_slow():
    assert countdown_reward("<answer>9**9**9**9</answer>", numbers=[9] * 4, target=9) == 0.1
    assert countdown_reward("<answer>" * 50_000 + "((((", numbers=[1], target=1) == 0.0
    assert countdown_reward("<answer>" + "(" * 200_000 + "</answer>", numbers=[1], target=1) == 0.1


def test_a_whole_row_of_a_dataset_can_be_passed():
    row = {"prompt": "Using the numbers 3, 5, 8 make 6.", "numbers": [3, 5, 8], "target": 6}
    assert get_reward("countdown")("<answer>3+8-5</answer>", **row) == 1.0


def test_an_unknown_reward_names_the_nearest_one():
    assert "countdown" in reward_names()
    with pytest.raises(ConfigError, match=r"one of boxed, .*Did you mean 'countdown'\?"):
        get_reward("count_down")
    with pytest.raises(ConfigError, match=r"file\.py:NAME\.$"):
        get_reward("zzz")
