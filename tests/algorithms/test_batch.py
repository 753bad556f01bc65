"""Batches: selected, masked and penalised completions, and the reductions of their losses."""

import math
from typing import get_args

import pytest
import torch
from kit.batches import batch_of
from random_batch import random_batch

from vectorlm.algorithms.reduce import count_denominator, reduce_loss
from vectorlm.algorithms.settings import Reduction
from vectorlm.algorithms.spec import keep_all, keep_best, keep_best_and_worst, keep_unscored

REWARDS = torch.tensor([[1.0, 2.0, 3.0]])


def test_a_row_that_loses_all_its_tokens_is_no_longer_valid():
    batch = batch_of([[0, 1, 1], [0, 1, 0], [0, 0, 0]], REWARDS)
    left = batch.without(torch.tensor([[0, 0, 1], [0, 1, 0], [1, 1, 1]]).bool())
    assert left.mask.tolist() == [[False, True, False], [False] * 3, [False] * 3]
    assert left.valid.tolist() == [[True, False, True]], "the last row has lost nothing"
    assert left.token_rewards.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert torch.equal(left.rewards, REWARDS)


def test_a_penalty_counts_at_its_token_and_for_its_completion():
    batch = batch_of([[0, 1, 1], [0, 1, 0], [1, 0, 0]], REWARDS)
    penalty = torch.tensor([[0.0, 0.5, 0.25], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    less = batch.penalised(penalty)
    assert less.rewards.tolist() == [[0.25, 1.0, 3.0]]
    assert less.token_rewards.tolist() == [[0.0, -0.5, 0.75], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]]


def test_lengths_and_first_trained_tokens():
    batch = batch_of([[0, 1, 1], [0, 0, 1], [0, 0, 0]], REWARDS)
    assert batch.first_trained == (1, 2, 3)
    assert batch.num_tokens == (3, 3, 3)
    assert batch.rows_per_group == 3


HOWS = get_args(Reduction)


def test_reductions_by_hand():
    losses = torch.tensor([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    found = {
        how: reduce_loss(losses, mask, how, 10.0 if how == "sequence_sum_fixed" else None).item()
        for how in HOWS
    }
    assert found == pytest.approx(
        {
            "token_mean": 3.0,
            "sequence_mean_token_mean": (1.5 + 6) / 2,
            "sequence_mean_token_sum": (3 + 6) / 2,
            "sequence_sum_fixed": 0.9,
        }
    )


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("parts", [[5], [1, 4], [2, 1, 2], [1, 1, 1, 1, 1]])
def test_any_split_gives_the_same_loss_and_gradient(how, parts):
    losses, _, _, mask = random_batch()
    denominator = count_denominator(mask, how, fixed_length=8)
    whole = reduce_loss(losses, mask, how, denominator)
    (expected,) = torch.autograd.grad(whole, losses)
    total = sum(
        reduce_loss(part, some, how, denominator)
        for part, some in zip(losses.split(parts), mask.split(parts), strict=True)
    )
    (gradient,) = torch.autograd.grad(total, losses)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", HOWS)
def test_what_stands_outside_the_mask_is_not_read(how):
    losses, _, _, mask = random_batch()
    spoilt = torch.where(mask, losses, torch.nan)
    loss = reduce_loss(spoilt, mask, how, 7.0)
    assert torch.equal(loss, reduce_loss(losses, mask, how, 7.0))
    (gradient,) = torch.autograd.grad(loss, losses)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("how", HOWS[:3])
def test_nothing_in_the_mask_is_no_loss(how):
    assert reduce_loss(torch.ones(2, 3), torch.zeros(2, 3), how).item() == 0.0


def test_denominators():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert [count_denominator(mask, how, fixed_length=5) for how in HOWS] == [3, 2, 2, 10]


def test_refusals_of_reductions():
    with pytest.raises(ValueError, match="how"):
        reduce_loss(torch.ones(1, 1), torch.ones(1, 1), "mean")
    with pytest.raises(ValueError, match="denominator"):
        reduce_loss(torch.ones(1, 1), torch.ones(1, 1), "sequence_sum_fixed")


NAN = math.nan
OF_GROUPS = torch.tensor([[0.1, 0.9, 0.9, 0.0], [0.5, 0.5, 0.5, 0.5], [NAN, 0.2, NAN, NAN], [NAN] * 4])
ALL = torch.ones(4, 4, dtype=torch.bool)


def test_all():
    columns, valid = keep_all(OF_GROUPS, ALL)
    assert columns.tolist() == [[0, 1, 2, 3]] * 4
    assert torch.equal(valid, ~OF_GROUPS.isnan())


def test_where_rewards_are_not_learned_from_a_missing_one_leaves_nothing_out():
    columns, valid = keep_unscored(OF_GROUPS, ALL)
    assert torch.equal(columns, keep_all(OF_GROUPS, ALL)[0])
    assert valid.all()


def test_the_best_and_the_first_of_equals():
    columns, valid = keep_best(OF_GROUPS, ALL)
    assert columns[:3, 0].tolist() == [1, 0, 1]
    assert valid[:, 0].tolist() == [True, True, True, False]


def test_a_pair_needs_a_difference():
    columns, valid = keep_best_and_worst(OF_GROUPS, ALL)
    assert columns[0].tolist() == [1, 3]
    assert valid.tolist() == [[True, True], [False, False], [False, False], [False, False]]


def test_what_is_not_valid_is_not_chosen():
    valid = ALL.clone()
    valid[0, 1] = valid[0, 3] = False
    assert keep_best_and_worst(OF_GROUPS, valid)[0][0].tolist() == [2, 0]
    assert keep_best(OF_GROUPS, valid)[0][0].tolist() == [2]
    assert not keep_all(OF_GROUPS, valid)[1][0, 1]
