"""The Countdown reward, and its entry in the registry."""

import pytest

from vectorlm.rl.rewards.countdown import countdown_reward
from vectorlm.rl.rewards.registry import get_reward


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
        # The last complete answer counts.
        ("<answer>3+8+5</answer> no: <answer>3+8-5</answer>", 1.0),
        ("<answer>3+8-5</answer> or <answer>3+8+5</answer>", 0.1),
        ("<answer>3+8-5</answer> or <answer>3+", 1.0),
        ("<answer>no <answer>3+8-5</answer>", 1.0),
        ("<answer>3+8-5</answer></answer>", 1.0),
    ],
)
def test_a_completion_earns_what_its_answer_is_worth(completion, reward):
    assert countdown_reward(completion, numbers=[3, 5, 8], target=6) == reward


@pytest.mark.parametrize(
    ("answer", "numbers", "target", "reward"),
    [
        # A number that occurs twice must be used twice, and fractions are exact.
        ("4+4+2", [4, 2, 4], 10, 1.0),
        ("2*4+2", [4, 2, 4], 10, 0.1),
        ("(1/3)*9", [1, 3, 9], 3, 1.0),
        ("10/3", [10, 3], 3, 0.1),
    ],
)
def test_numbers_are_counted_and_values_exact(answer, numbers, target, reward):
    assert countdown_reward(f"<answer>{answer}</answer>", numbers=numbers, target=target) == reward


def test_a_hostile_answer_is_neither_run_nor_slow():
    assert countdown_reward("<answer>9**9**9**9</answer>", numbers=[9] * 4, target=9) == 0.1
    assert countdown_reward("<answer>" * 50_000 + "((((", numbers=[1], target=1) == 0.0
    assert countdown_reward("<answer>" + "(" * 200_000 + "</answer>", numbers=[1], target=1) == 0.1


def test_a_whole_row_of_a_dataset_can_be_passed():
    row = {"prompt": "Using the numbers 3, 5, 8 make 6.", "numbers": [3, 5, 8], "target": 6}
    assert get_reward("countdown")("<answer>3+8-5</answer>", **row) == 1.0
