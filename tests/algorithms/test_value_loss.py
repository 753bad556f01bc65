"""The critic's loss."""

import pytest
import torch
from random_batch import places, random_batch

from vectorlm.algorithms.critic import value_loss


def test_by_hand():
    values, old, returns = (
        torch.tensor([[1.0, 2.0, 0.0]]),
        torch.tensor([[0.0, 2.0, 0.0]]),
        torch.tensor([[1.0, 0.0, 3.0]]),
    )
    # the first moved by 1 and may move by 0.5: (0.5 - 1)^2 counts, not 0
    assert value_loss(values, old, returns, 0.5).tolist() == [[0.125, 2.0, 4.5]]
    assert value_loss(values, old, returns, None).tolist() == [[0.0, 2.0, 4.5]]


def test_equals_a_slow_loop():
    values, old, returns, _ = random_batch()
    found = value_loss(values, old, returns, 0.2)
    for mine, v, o, r in places(found, values, old, returns):
        clipped = o + min(max(v - o, -0.2), 0.2)
        assert mine == pytest.approx(0.5 * max((v - r) ** 2, (clipped - r) ** 2), rel=1e-12)


def test_gradient():
    values, old, returns, _ = random_batch()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, 0.2), (values,))
