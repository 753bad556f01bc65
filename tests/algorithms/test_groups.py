"""Advantages from groups against hand-worked numbers, slow loops and their laws."""

import math
import statistics

import pytest
import torch

from vectorlm.algorithms import (
    baseline_advantages,
    batch_advantages,
    group_advantages,
    leave_one_out_advantages,
    return_advantages,
)
from vectorlm.algorithms.batch import place_rewards

NAN = math.nan


def random_rewards(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(6, 4, generator=generator, dtype=torch.float64)
    rewards[0] = 0.1  # one tenth has no exact mean in binary
    rewards[1, 2] = NAN
    valid = torch.rand(6, 4, generator=generator) < 0.8
    valid[2] = torch.tensor([True, False, False, False])
    return rewards, valid


def kept_of(rewards, valid, row):
    return [i for i in range(rewards.shape[1]) if valid[row, i] and not math.isnan(rewards[row, i])]


def test_hand_worked_groups():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    assert group_advantages(rewards, scale="none").tolist() == [[0.5, -0.5, -0.5, 0.5]]
    # unbiased standard deviation: sqrt(4 * 0.25 / 3)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    torch.testing.assert_close(group_advantages(rewards)[0, 0].item(), expected)
    torch.testing.assert_close(leave_one_out_advantages(rewards)[0].tolist(), [2 / 3, -2 / 3, -2 / 3, 2 / 3])


@pytest.mark.parametrize("scale", ["std", "none"])
def test_groups_equal_a_slow_loop(scale):
    rewards, valid = random_rewards()
    found = group_advantages(rewards, scale, valid)
    for row in range(len(rewards)):
        kept = kept_of(rewards, valid, row)
        numbers = [float(rewards[row, i]) for i in kept]
        for i in range(rewards.shape[1]):
            expected = 0.0
            if i in kept and len(kept) > 1 and len(set(numbers)) > 1:
                expected = float(rewards[row, i]) - statistics.fmean(numbers)
                expected /= statistics.stdev(numbers) + 1e-6 if scale == "std" else 1.0
            assert found[row, i].item() == pytest.approx(expected, abs=1e-12)


def test_leave_one_out_equals_a_slow_loop():
    rewards, valid = random_rewards()
    found = leave_one_out_advantages(rewards, valid)
    for row in range(len(rewards)):
        kept = kept_of(rewards, valid, row)
        for i in range(rewards.shape[1]):
            others = [float(rewards[row, j]) for j in kept if j != i]
            expected = float(rewards[row, i]) - statistics.fmean(others) if i in kept and others else 0.0
            assert found[row, i].item() == pytest.approx(expected, abs=1e-12)


def test_a_rejected_completion_leaves_the_baseline_too():
    rewards = torch.tensor([[1.0, 1.0, -100.0]])
    valid = torch.tensor([[True, True, False]])
    assert group_advantages(rewards, valid=valid).tolist() == [[0.0, 0.0, 0.0]]
    assert leave_one_out_advantages(rewards, valid).tolist() == [[0.0, 0.0, 0.0]]


def test_equal_rewards_give_exactly_zero():
    rewards = torch.full((3, 7), 0.1)
    for advantages in (
        group_advantages(rewards),
        leave_one_out_advantages(rewards),
        batch_advantages(rewards),
    ):
        assert advantages.eq(0).all()


def test_rows_sum_to_zero_and_a_shift_changes_nothing():
    rewards, valid = random_rewards()
    for function in (group_advantages, leave_one_out_advantages):
        found = function(rewards, valid=valid)
        torch.testing.assert_close(found.sum(dim=1), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-12)
        torch.testing.assert_close(function(rewards + 5, valid=valid), found, rtol=1e-9, atol=1e-9)


def test_leave_one_out_is_the_group_mean_scaled():
    rewards = random_rewards()[0][3:]
    torch.testing.assert_close(
        leave_one_out_advantages(rewards), group_advantages(rewards, "none") * 4 / 3, rtol=1e-12, atol=1e-12
    )


def test_the_batch_is_one_group():
    rewards, valid = random_rewards()
    numbers = [float(rewards[row, i]) for row in range(6) for i in kept_of(rewards, valid, row)]
    found = batch_advantages(rewards, valid)
    expected = (float(rewards[3, 0]) - statistics.fmean(numbers)) / (statistics.stdev(numbers) + 1e-6)
    assert valid[3, 0]
    assert found[3, 0].item() == pytest.approx(expected, abs=1e-12)
    pair = batch_advantages(torch.tensor([[1.0], [3.0]]))
    torch.testing.assert_close(pair, torch.tensor([[-(0.5**0.5)], [0.5**0.5]]))
    assert batch_advantages(torch.tensor([[1.0]])).tolist() == [[0.0]]


def test_returns_without_rewards_on_the_way_are_the_rewards():
    rewards = torch.tensor([[1.0, 0.5], [0.0, 0.25]])
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 1, 0]]).bool()
    found = return_advantages(place_rewards(mask, rewards), mask)
    torch.testing.assert_close(found, torch.where(mask, batch_advantages(rewards).view(-1, 1), 0.0))
    equal = torch.full((2, 2), 0.1)
    assert return_advantages(place_rewards(mask, equal), mask).eq(0).all()
    assert return_advantages(torch.ones(1, 3), torch.ones(1, 3).bool()).eq(0).all()


def test_a_known_baseline():
    rewards = torch.tensor([[1.0, NAN], [0.5, 0.25]])
    baseline = torch.tensor([0.25, 1.0])
    assert baseline_advantages(rewards, baseline).tolist() == [[0.75, 0.0], [-0.5, -0.75]]
    assert baseline_advantages(rewards, torch.tensor([NAN, 1.0]))[0].tolist() == [0.0, 0.0]
    valid = torch.tensor([[True, True], [False, True]])
    assert baseline_advantages(rewards, baseline, valid).tolist() == [[0.75, 0.0], [0.0, -0.75]]


@pytest.mark.parametrize("function", [group_advantages, leave_one_out_advantages])
def test_a_single_completion_is_refused(function):
    with pytest.raises(ValueError, match="at least 2 per prompt"):
        function(torch.ones(3, 1))


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="'mad' is unknown"):
        group_advantages(torch.ones(1, 2), "mad")
