"""Advantages against hand-worked numbers, slow loops and their invariants."""

import itertools
import math
import statistics
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.batches import batch_of
from random_batch import random_batch

from vectorlm.algorithms.batch import RolloutBatch, place_rewards
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
    scaled_as_groups,
    turn_advantages,
    whiten,
)
from vectorlm.algorithms.registry import get_algorithm
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
    """Enumerate all choices of k completions; standardise the mean best reward of a completion's choices."""
    choices = list(combinations(range(len(numbers)), k))
    best = [max(numbers[i] for i in choice) for choice in choices]
    mean, spread = statistics.fmean(best), statistics.pstdev(best)
    mine = [
        statistics.fmean(value for value, choice in zip(best, choices, strict=True) if i in choice)
        for i in range(len(numbers))
    ]
    return [(own_mean - mean) / (spread + 1e-6) for own_mean in mine]


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
    """This is the paper's example: as sums, (0, 1) and (0, 2) have the same group advantages."""
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


@pytest.mark.parametrize("has_turns", [False, True])
@pytest.mark.parametrize("why", ["no reward", "rejected", "truncated"])
def test_groups_without_trained_tokens_do_not_scale_up_the_others(why, has_turns):
    """Group 0 differs, group 1 is constant, and no token of group 2 is in the denominator of the loss."""
    mask, spec = torch.ones(6, 2, dtype=torch.bool), get_algorithm("gpg")
    rewards = torch.tensor([[1.0, 0.0], [0.5, 0.5], [NAN, NAN] if why == "no reward" else [2.0, 0.0]])
    last = mask & (torch.arange(6) >= 4)[:, None]
    batch = batch_of(mask, rewards)
    if has_turns:
        turns = {"turns": torch.zeros(6, 2, dtype=torch.int64), "turn_rewards": torch.zeros(6, 2)}
        batch = replace(batch, **turns)
    is_cut = why == "truncated"
    batch = replace(batch, mask=mask & ~last, baseline_mask=mask) if is_cut else batch.without(last)
    found = spec.advantages(batch.for_baselines(), spec.settings)
    assert found[:4, 0].tolist() == [1.0, -1.0, 0.0, 0.0]
    assert found[4:].any() == is_cut
    assert rescaled_advantages(torch.tensor([[1.0, 0.0], [0.5, 0.5], [NAN, NAN]]))[0].tolist() == [1.0, -1.0]


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
                expected = value(row, t)[0] - baseline[max(place for place in baseline if place <= t)]
            assert found[row, t].item() == pytest.approx(expected, abs=1e-12)


def test_the_optimal_token_baseline_counts_the_squares_of_a_corrections_weights():
    ones = torch.ones(2, 1, dtype=torch.float64)
    rewards, weights = torch.tensor([[1.0], [0.0]]).double(), torch.tensor([[1.0], [2.0]]).double()
    found = optimal_token_advantages(rewards, ones, ones.bool(), 2, weights)
    assert found.flatten().tolist() == pytest.approx([0.8, -0.2])
    # Compute the baseline that minimises the second moment of w (G - b) s, over ten tokens and one group.
    generator = torch.Generator().manual_seed(4)
    norms, weights, rewards = (torch.rand(3, 10, generator=generator, dtype=torch.float64) for _ in range(3))
    found = optimal_token_advantages(rewards, norms, torch.ones(3, 10).bool(), 3, weights)
    for t in range(10):
        energy = [sum(float(norms[row, k] * weights[row, k] ** 2) for k in range(t + 1)) for row in range(3)]
        ahead = [float(rewards[row, t:].sum()) for row in range(3)]
        baseline = sum(e * g for e, g in zip(energy, ahead, strict=True)) / sum(energy)
        assert found[:, t].tolist() == pytest.approx([g - baseline for g in ahead])


@pytest.mark.parametrize(
    "norms", [(3e-8, -3e-8, 0.0), (-6e-8, -6e-8, 0.0), (0.0, 0.0, 0.0), (3e-8, -6e-8, 1e-9)]
)
def test_norms_that_rounding_made_negative_do_not_make_the_optimal_baseline_explode(norms):
    rewards = torch.tensor([[1.0], [0.0], [0.0]])
    ones = torch.ones(3, 1, dtype=torch.bool)
    found = optimal_token_advantages(rewards, torch.tensor(norms)[:, None], ones, 3)
    kept = [max(norm, 0.0) for norm in norms]
    baseline = kept[0] / sum(kept) if any(kept) else 1 / 3
    assert found.flatten().tolist() == pytest.approx([1 - baseline, -baseline, -baseline])


@pytest.mark.parametrize(
    "parts", [((0.7, 0.2), (0.8, 0.1)), ((100.1, 0.2), (100.0, 0.3)), ((-0.7, -0.2), (-0.8, -0.1))]
)
def test_rewards_that_differ_by_rounding_are_equal(parts):
    """Half the completions reach the same total with other addends, added in float32."""
    totals = [torch.tensor(addends).sum() for addends in parts]
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
    """Large float32 addends that cancel reach every total; the last total differs by a tenth."""
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


def test_whitening_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0, 100.0], dtype=torch.float64)
    found = whiten(x, torch.tensor([1, 1, 1, 0]), eps=0.0)
    assert found.tolist() == [-1.0, 0.0, 1.0, 0.0]


def test_whitened_numbers_have_mean_0_and_deviation_1():
    _, x, _, mask = random_batch()
    found = whiten(x, mask)[mask]
    torch.testing.assert_close(found.mean(), torch.tensor(0.0, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.std(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-6, atol=0)


def test_padding_does_not_change_whitened_numbers_even_if_it_is_nan():
    _, x, _, mask = random_batch()
    spoilt = torch.where(mask, x, torch.nan)
    assert torch.equal(whiten(spoilt, mask), whiten(x, mask))


def test_whitening_sets_one_number_and_equal_numbers_to_zero():
    assert whiten(torch.tensor([3.0, 5.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([3.0, 3.0]), torch.tensor([True, True])).tolist() == [0.0, 0.0]


EXACT = {"rtol": 0, "atol": 1e-12}

# A game of two turns: stop, or pay to continue and then guess. An outcome has choices and rewards by turn.
OUTCOMES = [((0,), (0.3,)), ((1, 0), (-0.2, 1.0)), ((1, 1), (-0.2, 0.1))]


def log_probability(logits, choices):
    return sum(torch.log_softmax(logits[turn], dim=0)[choice] for turn, choice in enumerate(choices))


def rows_of(outcomes):
    """Return token rewards, turns and mask of a group. Each turn is one token, with a tool's token between turns."""
    rewards, turns = torch.zeros(len(outcomes), 3, dtype=torch.float64), torch.tensor([[0, 1, 1]])
    mask = torch.zeros(len(outcomes), 3, dtype=torch.bool)
    for row, (choices, of_turns) in enumerate(outcomes):
        for place, reward in zip((0, 2), of_turns[: len(choices)], strict=False):
            rewards[row, place], mask[row, place] = reward, True
    return rewards, turns.expand(len(outcomes), 3), mask


def alone_included(rewards, turns, mask, group_size):
    """Return advantages over the mean of all completions that reached a turn, including the completion itself."""
    returns = torch.where(mask, rewards, 0.0).flip(1).cumsum(1).flip(1)
    mean = torch.where(mask, returns, 0.0).sum(0) / mask.sum(0).clamp(min=1)
    return torch.where(mask, returns - mean, 0.0)


def by_token(rewards, turns, mask, group_size):
    advantages, *_ = turn_advantages(rewards, turns, mask, group_size)
    return torch.where(mask, advantages.flatten(0, 1).gather(1, torch.where(mask, turns, 0)), 0.0)


def mean_gradients(advantages_of, group_size, logits):
    """Return the gradient of a loss, averaged over all groups, and the gradient of the mean reward."""
    expected = torch.zeros_like(logits)
    value = sum(log_probability(logits, choices).exp() * sum(of_turns) for choices, of_turns in OUTCOMES)
    (true,) = torch.autograd.grad(value, logits)
    for group in itertools.product(OUTCOMES, repeat=group_size):
        chance = torch.stack([log_probability(logits, choices) for choices, _ in group]).sum().exp().item()
        advantages = advantages_of(*rows_of(group), group_size)
        surrogate = sum(
            advantages[row, 2 * turn] * torch.log_softmax(logits[turn], dim=0)[choice]
            for row, (choices, _) in enumerate(group)
            for turn, choice in enumerate(choices)
        )
        (gradient,) = torch.autograd.grad(surrogate, logits)
        expected += chance * gradient / group_size
    return expected, true


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_gradient_is_that_of_the_mean_reward_although_the_policy_decides_when_to_stop(
    group_size, seed
):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 2, generator=generator, dtype=torch.float64).requires_grad_()
    found, true = mean_gradients(by_token, group_size, logits)
    torch.testing.assert_close(found, true, **EXACT)
    biased, _ = mean_gradients(alone_included, group_size, logits)
    # The biased gradient is no multiple of the true one: each turn is off by another factor.
    factors = (biased / true)[:, 0]
    assert abs(factors[0] - factors[1]) > 1e-3


def test_one_turn_is_what_groups_of_completions_give():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    rewards[2] = 0.7
    mask = torch.ones(20, 2, dtype=torch.bool)
    placed = torch.zeros(20, 2, dtype=torch.float64)
    placed[:, 1] = rewards.view(-1)
    found, *more = turn_advantages(placed, torch.zeros(20, 2, dtype=torch.int64), mask, 4)
    torch.testing.assert_close(found[..., 0], leave_one_out_advantages(rewards), **EXACT)
    for scale in ("group", "batch", "none"):
        torch.testing.assert_close(
            scaled_as_groups(found, *more, scale)[..., 0], group_advantages(rewards, scale), **EXACT
        )


def test_a_completion_that_went_on_alone_keeps_the_advantage_of_its_last_turn_in_company():
    rewards = torch.tensor([[0.0, 0.0, 5.0], [1.0, 0.0, 0.0]])
    mask = torch.tensor([[True, False, True], [True, False, False]])
    found, has_turn, _ = turn_advantages(rewards, torch.tensor([[0, 1, 1]] * 2), mask, 2)
    assert found.tolist() == [[[4.0, 4.0], [-4.0, 0.0]]]
    assert has_turn.tolist() == [[[True, True], [True, False]]]
    # If the other completion is masked out, there is nothing to compare with.
    found, *_ = turn_advantages(
        rewards, torch.tensor([[0, 1, 1]] * 2), mask & torch.tensor([[True], [False]]), 2
    )
    assert not found.any()


def test_rewards_of_turns_stay_with_their_turns_and_the_rest_comes_at_the_end():
    mask = torch.tensor([[False, True, True, False, True]])
    of_turns = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.25]])
    total = torch.tensor([[1.0]])
    assert place_rewards(mask, total, of_turns).tolist() == [[0.0, 0.0, 0.5, 0.0, 0.5]]
    # A masked end of the first turn moves its reward to the rest of the turn; a masked turn drops its reward.
    mask[0, 2] = False
    assert place_rewards(mask, total, of_turns).tolist() == [[0.0, 0.5, 0.0, 0.0, 0.5]]
    mask[0, 1] = False
    assert place_rewards(mask, total, of_turns).tolist() == [[0.0, 0.0, 0.0, 0.0, 0.5]]


def batch_with_turns(turns, turn_rewards):
    mask = torch.tensor([[True, False, True], [True, False, False]])
    rewards = torch.tensor([[2.0, 1.0]])
    return RolloutBatch(
        torch.zeros(2, 3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.int64),
        mask,
        torch.zeros(2, 3),
        rewards,
        torch.ones(1, 2, dtype=torch.bool),
        torch.tensor([[0, 1]]),
        place_rewards(mask, rewards, turn_rewards),
        values=torch.zeros(2, 3),
        turns=turns,
        turn_rewards=turn_rewards,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The totals are 2 and 1. The first row has a reward of 1.5 in its first turn, and continues alone.
        ("rloo", [[1.0, 0.0, 1.0], [-1.0, 0.0, 0.0]]),
        ("dr_grpo", [[0.5, 0.0, 0.5], [-0.5, 0.0, 0.0]]),
        ("gpg", [[0.5, 0.0, 0.5], [-0.5, 0.0, 0.0]]),
        # The returns of the three turns are 2, 0.5 and 1, and their standard deviation is 0.764.
        ("lite_ppo", [[0.6547, 0.0, 0.6547], [-0.6547, 0.0, 0.0]]),
        ("reinforce", [[2.0, 0.0, 0.5], [1.0, 0.0, 0.0]]),
        ("ppo", [[2.0, 0.0, 0.5], [1.0, 0.0, 0.0]]),
    ],
)
def test_what_an_algorithm_learns_from_rewards_of_turns(name, expected):
    spec = get_algorithm(name)
    turns, turn_rewards = torch.tensor([[0, 1, 1]] * 2), torch.tensor([[1.5, 0.0, 0.0], [0.0] * 3])
    found = spec.advantages(batch_with_turns(turns, turn_rewards), spec.settings)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_a_completion_whose_first_turn_was_rejected_is_compared_in_the_turns_that_it_has():
    """No other completion has a second turn, and the turn is compared like a first one; the rejected turn is masked."""
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.25, 0.0, 0.0], [0.5, 0.0, 0.0]], dtype=torch.float64)
    turns = torch.tensor([[0, 1, 1]]).expand(3, 3)
    mask = torch.tensor([[False, False, True], [True, False, False], [True, False, False]])
    found = by_token(rewards, turns, mask, 3)
    assert found[mask].tolist() == [1.0 - 0.375, 0.25 - 0.75, 0.5 - 0.625]
