"""Reductions: by hand, and the law that a step's loss does not depend on how it was split."""

from typing import get_args

import pytest
import torch
from random_batch import random_batch

from vectorlm.algorithms.reduce import count_denominator, reduce_loss
from vectorlm.algorithms.settings import Reduction

HOWS = get_args(Reduction)


def test_by_hand():
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


def test_refusals():
    with pytest.raises(ValueError, match="how"):
        reduce_loss(torch.ones(1, 1), torch.ones(1, 1), "mean")
    with pytest.raises(ValueError, match="denominator"):
        reduce_loss(torch.ones(1, 1), torch.ones(1, 1), "sequence_sum_fixed")
