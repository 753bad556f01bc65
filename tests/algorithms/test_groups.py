"""Advantages from groups against hand-worked numbers, slow loops and their laws."""

import math
import statistics
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vectorlm.algorithms.batch import place_rewards
from vectorlm.algorithms.groups import (
    baseline_advantages,
    batch_advantages,
    decoupled_advantages,
    group_advantages,
    join_equal,
    leave_one_out_advantages,
    length_weighted_advantages,
    optimal_token_advantages,
    pass_at_k_advantages,
    rescaled_advantages,
    return_advantages,
)
from vectorlm.algorithms.spec import keep_best_and_worst

NAN = math.nan


def random_rewards():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(6, 4, generator=generator, dtype=torch.float64)
    rewards[0] = 0.1  # one tenth has no exact mean in binary
    rewards[1, 2] = NAN
    valid = torch.rand(6, 4, generator=generator) < 0.8
    valid[2] = torch.tensor([True, False, False, False])
    return rewards, valid


def kept_of(rewards, valid, row):
    return [i for i in range(rewards.shape[1]) if valid[row, i] and not math.isnan(rewards[row, i])]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_equal_a_slow_loop(scale):
    rewards, valid = random_rewards()
    found = group_advantages(rewards, scale, valid)
    every = [float(rewards[row, i]) for row in range(6) for i in kept_of(rewards, valid, row)]
    for row in range(len(rewards)):
        kept = kept_of(rewards, valid, row)
        numbers = [float(rewards[row, i]) for i in kept]
        for i in range(rewards.shape[1]):
            expected = 0.0
            if i in kept and len(kept) > 1 and len(set(numbers)) > 1:
                expected = float(rewards[row, i]) - statistics.fmean(numbers)
                spread = {"group": numbers, "batch": every}.get(scale)
                expected /= 1.0 if spread is None else statistics.stdev(spread) + 1e-6
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
    with pytest.raises(ValueError, match="rewards"):
        function(torch.ones(3, 1))


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="scale"):
        group_advantages(torch.ones(1, 2), "mad")


def slow_pass_at_k(numbers, k):
    """The rewards of all choices of k, and the mean over those that hold each completion."""
    choices = list(combinations(range(len(numbers)), k))
    best = [max(numbers[i] for i in choice) for choice in choices]
    mean, spread = statistics.fmean(best), statistics.pstdev(best)
    mine = [
        statistics.fmean(value for value, choice in zip(best, choices, strict=True) if i in choice)
        for i in range(len(numbers))
    ]
    return [(each - mean) / (spread + 1e-6) for each in mine]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_equals_all_choices(k):
    generator = torch.Generator().manual_seed(1)
    rewards = torch.rand(5, 7, generator=generator, dtype=torch.float64)
    rewards[1] = rewards[1].round()
    rewards[2, 3:5] = rewards[2, 0]
    rewards[3, 2] = NAN
    valid = torch.rand(5, 7, generator=generator) < 0.8
    found = pass_at_k_advantages(rewards, k, valid)
    for row in range(5):
        kept = kept_of(rewards, valid, row)
        expected = dict(zip(kept, slow_pass_at_k([float(rewards[row, i]) for i in kept], k), strict=True))
        for i in range(7):
            assert found[row, i].item() == pytest.approx(expected.get(i, 0.0), abs=1e-9)


def test_pass_at_k_of_too_few_is_zero_and_of_none_is_refused():
    rewards = torch.tensor([[1.0, 0.0, NAN, NAN]])
    assert pass_at_k_advantages(rewards, 3).tolist() == [[0.0] * 4]
    assert pass_at_k_advantages(torch.full((1, 4), 0.1), 2).eq(0).all()
    with pytest.raises(ValueError, match="k=5"):
        pass_at_k_advantages(rewards, 5)


def test_decoupled_rewards_equal_a_slow_loop():
    generator = torch.Generator().manual_seed(3)
    parts = torch.rand(2, 4, 3, generator=generator, dtype=torch.float64)
    parts[1, 0] = 0.3
    parts[1, 2, 1] = NAN
    valid = torch.ones(4, 3, dtype=torch.bool)
    valid[3, 0] = False
    sums = {}
    for group in range(4):
        for i in range(3):
            if valid[group, i]:
                total = 0.0
                for part, weight in zip(parts, (1.0, 0.5), strict=True):
                    kept = kept_of(part, valid, group)
                    numbers = [float(part[group, j]) for j in kept]
                    if i in kept and len(set(numbers)) > 1:
                        centred = float(part[group, i]) - statistics.fmean(numbers)
                        total += weight * centred / (statistics.stdev(numbers) + 1e-6)
                sums[group, i] = total
    mean, spread = statistics.fmean(sums.values()), statistics.stdev(sums.values())
    found = decoupled_advantages(parts, torch.tensor([1.0, 0.5], dtype=torch.float64), valid)
    for group in range(4):
        for i in range(3):
            expected = (sums[group, i] - mean) / (spread + 1e-6) if (group, i) in sums else 0.0
            assert found[group, i].item() == pytest.approx(expected, abs=1e-9)


def test_rewards_of_equal_sums_are_told_apart():
    """The case of the paper: (0, 1) and (0, 2) have the same group advantages as sums."""
    first = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    second = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(*group_advantages(first + second).split(1), rtol=1e-5, atol=1e-5)
    found = decoupled_advantages(torch.stack([first, second]), torch.ones(2))
    assert found[1, 1] > 1.5 * found[0, 1]


def test_a_baseline_weighted_by_length():
    rewards = torch.tensor([[1.0, 0.0, 0.5]])
    lengths = torch.tensor([[1, 3, 4]])
    assert length_weighted_advantages(rewards, lengths)[0].tolist() == pytest.approx([0.625, -0.375, 0.125])
    valid = torch.tensor([[True, True, False]])
    assert length_weighted_advantages(rewards, lengths, valid)[0].tolist() == [0.75, -0.25, 0.0]
    equal = length_weighted_advantages(rewards, torch.full((1, 3), 7))
    torch.testing.assert_close(equal, group_advantages(rewards, "none"))


def test_groups_that_teach_nothing_do_not_shrink_the_others():
    rewards = torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 1.0]])
    assert rescaled_advantages(rewards).tolist() == [[1.5, -1.5], [0.0, 0.0], [0.0, 0.0]]
    assert rescaled_advantages(torch.ones(2, 2)).eq(0).all()


def test_the_optimal_token_baseline_equals_a_slow_loop():
    generator = torch.Generator().manual_seed(4)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0], [0] * 6]).bool()
    norms, rewards = (torch.rand(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    found = optimal_token_advantages(rewards, norms, mask, 2)

    def value(row, t):
        ahead = [float(rewards[row, j]) for j in range(t, 6) if mask[row, j]]
        behind = [float(norms[row, j]) for j in range(t + 1) if mask[row, j]]
        return sum(ahead), sum(behind)

    baseline = {}
    for t in range(6):
        there = [row for row in (0, 1) if mask[row, t]]
        if len(there) == 2:
            pairs = [value(row, t) for row in there]
            baseline[t] = sum(g * w for g, w in pairs) / sum(w for _, w in pairs)
    for row in range(4):
        for t in range(6):
            expected = 0.0
            if mask[row, t] and row < 2:
                expected = value(row, t)[0] - baseline[max(each for each in baseline if each <= t)]
            assert found[row, t].item() == pytest.approx(expected, abs=1e-12)


def test_the_optimal_token_baseline_counts_the_squares_of_a_corrections_weights():
    ones = torch.ones(2, 1, dtype=torch.float64)
    rewards, weights = torch.tensor([[1.0], [0.0]]).double(), torch.tensor([[1.0], [2.0]]).double()
    found = optimal_token_advantages(rewards, ones, ones.bool(), 2, weights)
    assert found.flatten().tolist() == pytest.approx([0.8, -0.2])
    # The baseline that makes the second moment of w (G - b) s smallest, over ten tokens and one group.
    generator = torch.Generator().manual_seed(4)
    norms, weights, rewards = (torch.rand(3, 10, generator=generator, dtype=torch.float64) for _ in range(3))
    found = optimal_token_advantages(rewards, norms, torch.ones(3, 10).bool(), 3, weights)
    for t in range(10):
        energy = [sum(float(norms[row, k] * weights[row, k] ** 2) for k in range(t + 1)) for row in range(3)]
        ahead = [float(rewards[row, t:].sum()) for row in range(3)]
        baseline = sum(e * g for e, g in zip(energy, ahead, strict=True)) / sum(energy)
        assert found[:, t].tolist() == pytest.approx([g - baseline for g in ahead])


def test_of_all_baselines_the_optimal_one_varies_least():
    """The variance of (G - b) |s| over completions with weights |s|^2 is smallest at b = sum w G / sum w."""
    generator = torch.Generator().manual_seed(5)
    norms, rewards = torch.rand(6, 1, generator=generator), torch.rand(6, 1, generator=generator)
    advantages = optimal_token_advantages(rewards, norms, torch.ones(6, 1).bool(), 6)
    best = (advantages.square() * norms).sum()
    for shift in (-0.1, 0.1):
        assert ((advantages + shift).square() * norms).sum() > best


@pytest.mark.parametrize(
    "parts", [((0.7, 0.2), (0.8, 0.1)), ((100.1, 0.2), (100.0, 0.3)), ((-0.7, -0.2), (-0.8, -0.1))]
)
def test_rewards_that_differ_by_rounding_are_equal(parts):
    """Half the completions reach the same total by other addends, added in float32."""
    totals = [torch.tensor(each).sum() for each in parts]
    rewards = torch.stack([totals[index % 2] for index in range(4)]).repeat(2, 1)
    assert len(set(rewards.flatten().tolist())) == 2
    lengths = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2)
    mask = torch.ones(8, 3, dtype=torch.bool)
    for advantages in (
        group_advantages(rewards),
        group_advantages(rewards, "batch"),
        leave_one_out_advantages(rewards),
        pass_at_k_advantages(rewards, 2),
        decoupled_advantages(rewards[None], torch.ones(1)),
        length_weighted_advantages(rewards, lengths),
        rescaled_advantages(rewards),
        optimal_token_advantages(place_rewards(mask, rewards), mask.float(), mask, 4),
        batch_advantages(rewards),
        return_advantages(place_rewards(mask, rewards), mask),
    ):
        assert not advantages.any()
    assert not keep_best_and_worst(rewards, torch.ones(2, 4, dtype=torch.bool))[1].any()


@given(
    cents=st.lists(st.tuples(st.integers(-(10**5), 10**5), st.integers(0, 100)), min_size=2, max_size=6),
    total=st.integers(-50, 50),
)
def test_sums_that_are_equal_by_decimal_arithmetic_are_joined_and_others_are_not(cents, total):
    """Every total is reached by large addends that cancel, in float32; the last one is a tenth away."""
    parts = [(first / 100, (total - first) / 100) for first, _ in cents]
    parts.append((parts[0][0], parts[0][1] + 0.1))
    addends = torch.tensor(parts).T
    joined = join_equal(addends.sum(dim=0), addends)
    largest = addends.abs().max().item()
    assert len(set(joined[:-1].tolist())) == 1
    assert joined[-1] > joined[0]
    torch.testing.assert_close(joined, addends.sum(dim=0), rtol=0, atol=1e-6 * largest)


def test_joined_rewards_keep_nan_and_what_differs():
    rewards = torch.tensor([1.0, NAN, 0.5, 1.0 + 1e-7])
    assert join_equal(rewards, rewards[None]).tolist()[0] == join_equal(rewards, rewards[None]).tolist()[3]
    assert join_equal(rewards, rewards[None])[1].isnan()
    assert join_equal(rewards, rewards[None])[2] == 0.5
