"""The concurrency limit, with an engine whose rate stops growing at some number of sequences."""

import random

import pytest

from vectorlm.rl.rollouts.actor import ConcurrencyLimit

TOKENS = 20


def found(knee, most=10_000, noise=0.0, has_waiting=True, num_answers=60_000, first=64):
    """Return the limits after each answer of an engine whose rate grows up to `knee` sequences."""
    limit, now_s, dice, sizes = ConcurrencyLimit(first, most), 0.0, random.Random(3), []
    for _ in range(num_answers):
        limit.has_waiting = has_waiting
        rate = 10.0 * min(limit.size, knee) * dice.uniform(1 - noise, 1 + noise)
        now_s += TOKENS / rate
        limit.answered(TOKENS, now_s)
        sizes.append(limit.size)
    return sizes


@pytest.mark.parametrize("knee", [30, 100, 700])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_it_grows_until_the_rate_does_not(knee, noise):
    sizes = found(knee, noise=noise)
    mostly = sorted(sizes[len(sizes) // 2 :])[len(sizes) // 4]
    assert max(min(knee, 64) * 0.9, knee * 0.6) <= mostly <= max(1.6 * knee, 64)


def test_it_stays_where_nothing_waits_for_it_and_within_its_bound():
    assert set(found(700, has_waiting=False)) == {64}
    assert set(found(700, most=None)) == {64}
    assert max(found(700, most=100)) == 100
