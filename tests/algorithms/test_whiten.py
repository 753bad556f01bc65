"""Whitened numbers have mean 0 and standard deviation 1 where the mask is set."""

import torch
from random_batch import random_batch

from vectorlm.algorithms.groups import whiten


def test_hand_worked_numbers():
    x = torch.tensor([1.0, 2.0, 3.0, 100.0], dtype=torch.float64)
    found = whiten(x, torch.tensor([1, 1, 1, 0]), eps=0.0)
    assert found.tolist() == [-1.0, 0.0, 1.0, 0.0]


def test_mean_and_deviation():
    _, x, _, mask = random_batch()
    found = whiten(x, mask)[mask]
    torch.testing.assert_close(found.mean(), torch.tensor(0.0, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.std(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-6, atol=0)


def test_padding_changes_nothing_even_where_it_is_nan():
    _, x, _, mask = random_batch()
    spoilt = torch.where(mask, x, torch.nan)
    assert torch.equal(whiten(spoilt, mask), whiten(x, mask))


def test_one_number_and_equal_numbers_become_zero():
    assert whiten(torch.tensor([3.0, 5.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([3.0, 3.0]), torch.tensor([True, True])).tolist() == [0.0, 0.0]
