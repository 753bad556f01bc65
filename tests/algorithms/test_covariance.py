"""Tokens chosen by covariance: against a slow loop, and how many."""

import statistics

import torch
from random_batch import places, random_batch

from vectorlm.algorithms.policy_loss import covariances, drawn_between, highest


def test_covariances_equal_a_slow_loop():
    policy, _, advantages, mask = random_batch()
    found = covariances(policy.detach(), advantages, mask)
    mean_p, mean_a = (statistics.fmean(each[mask].tolist()) for each in (policy, advantages))
    for mine, p, a, is_inside in places(found, policy, advantages, mask):
        assert abs(mine - (p - mean_p) * (a - mean_a) * is_inside) < 1e-12
    # The mean over tokens is the covariance of the two.
    inside = torch.stack([policy.detach()[mask], advantages[mask]])
    torch.testing.assert_close(found[mask].mean(), torch.cov(inside, correction=0)[0, 1])


def test_the_highest_share():
    values = torch.arange(12.0).view(3, 4)
    mask = values != 11
    assert values[highest(values, mask, 0.2)].tolist() == [9.0, 10.0]
    assert values[highest(values, mask, 1e-6)].tolist() == [10.0], "one at least"
    assert torch.equal(highest(values, mask, 1.0), mask)
    assert not highest(values, torch.zeros_like(mask), 0.5).any()


def test_tokens_are_drawn_between_bounds_by_the_seed():
    values = torch.arange(100.0).view(10, 10)
    mask = values % 3 > 0
    draws = [drawn_between(values, mask, 0.1, 20.0, 60.0, seed) for seed in range(50)]
    assert all(int(each.sum()) == 6 for each in draws)
    assert torch.equal(draws[3], drawn_between(values, mask, 0.1, 20.0, 60.0, 3))
    between = mask & (values > 20) & (values < 60)
    assert torch.equal(torch.stack(draws).any(dim=0), between), "each one between the bounds, and no other"
    assert torch.equal(drawn_between(values, mask, 1.0, 20.0, 60.0, 0), between)
    assert not drawn_between(values, mask, 0.1, 200.0, 300.0, 0).any()
