"""Which completions of a group are trained on."""

import math

import torch

from vectorlm.algorithms.spec import keep_all, keep_best, keep_best_and_worst, keep_unscored

NAN = math.nan
REWARDS = torch.tensor([[0.1, 0.9, 0.9, 0.0], [0.5, 0.5, 0.5, 0.5], [NAN, 0.2, NAN, NAN], [NAN] * 4])
ALL = torch.ones(4, 4, dtype=torch.bool)


def test_all():
    columns, valid = keep_all(REWARDS, ALL)
    assert columns.tolist() == [[0, 1, 2, 3]] * 4
    assert torch.equal(valid, ~REWARDS.isnan())


def test_where_rewards_are_not_learned_from_a_missing_one_leaves_nothing_out():
    columns, valid = keep_unscored(REWARDS, ALL)
    assert torch.equal(columns, keep_all(REWARDS, ALL)[0])
    assert valid.all()


def test_the_best_and_the_first_of_equals():
    columns, valid = keep_best(REWARDS, ALL)
    assert columns[:3, 0].tolist() == [1, 0, 1]
    assert valid[:, 0].tolist() == [True, True, True, False]


def test_a_pair_needs_a_difference():
    columns, valid = keep_best_and_worst(REWARDS, ALL)
    assert columns[0].tolist() == [1, 3]
    assert valid.tolist() == [[True, True], [False, False], [False, False], [False, False]]


def test_what_is_not_valid_is_not_chosen():
    valid = ALL.clone()
    valid[0, 1] = valid[0, 3] = False
    assert keep_best_and_worst(REWARDS, valid)[0][0].tolist() == [2, 0]
    assert keep_best(REWARDS, valid)[0][0].tolist() == [2]
    assert not keep_all(REWARDS, valid)[1][0, 1]
