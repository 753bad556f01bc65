"""Rows shared out by length: every row once, sums nearly equal, the budget kept by all."""

import itertools
import random

import pytest

from vectorlm.errors import ConfigError
from vectorlm.rl.micro_batch import PASS_TOKENS, partition, plan_micro_batches


def best_makespan(weights, num_parts):
    return min(
        max(sum(w for w, part in zip(weights, parts, strict=True) if part == p) for p in range(num_parts))
        for parts in itertools.product(range(num_parts), repeat=len(weights))
    )


def test_the_textbook_example():
    # Karmarkar and Karp's differencing of 8, 7, 6, 5, 4 leaves 2; the best possible is 0.
    parts = partition([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_every_index_once_and_near_the_best(num_parts):
    generator = random.Random(num_parts)
    for _ in range(20):
        weights = [generator.randint(1, 40) for _ in range(8)]
        parts = partition(weights, num_parts)
        assert sorted(itertools.chain(*parts)) == list(range(8))
        largest = max(sum(weights[i] for i in part) for part in parts)
        assert largest <= 1.2 * best_makespan(weights, num_parts)


def test_fewer_rows_than_parts():
    assert sorted(map(len, partition([3, 2], 4))) == [0, 0, 1, 1]
    assert partition([], 2) == [[], []]


@pytest.mark.parametrize("rows_per_unit", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_budget_is_hard_and_all_ranks_have_as_many_micro_batches(num_ranks, rows_per_unit):
    generator = random.Random(0)
    for _ in range(30):
        lengths = [generator.randint(1, 50) for _ in range(generator.randint(0, 25))]
        plan = plan_micro_batches(lengths, num_ranks, 50 * rows_per_unit + 37, rows_per_unit)
        assert len({len(share) for share in plan}) == 1
        assert sorted(i for share in plan for part in share for i in part) == list(range(len(lengths)))
        for part in itertools.chain(*plan):
            longest = max((lengths[i] for i in part), default=0)
            assert len(part) * rows_per_unit * longest <= 50 * rows_per_unit + 37


def test_rows_of_like_length_share_a_micro_batch():
    assert plan_micro_batches([9, 1, 9, 1], 1, 18) == [[[0, 2], [1, 3]]]


@pytest.mark.parametrize("rows_per_unit", [1, 4])
def test_short_rows_are_not_padded_beyond_what_a_pass_costs(rows_per_unit):
    padded = (PASS_TOKENS // rows_per_unit) // 290
    (share,) = plan_micro_batches([300, *[10] * 200], 1, 1_000_000, rows_per_unit)
    assert [len(part) for part in share] == [1 + padded, 200 - padded]
    # Rows of one length are padded by nothing, however many they are.
    (share,) = plan_micro_batches([300] * 200, 1, 1_000_000, rows_per_unit)
    assert len(share) == 1


@pytest.mark.parametrize(
    ("rows_per_unit", "words"), [(1, "a row takes: 30"), (2, "a group of 2 rows takes: 60")]
)
def test_a_row_beyond_the_budget_is_refused_with_numbers(rows_per_unit, words):
    with pytest.raises(ConfigError, match=words):
        plan_micro_batches([10, 30], 2, 29, rows_per_unit)
