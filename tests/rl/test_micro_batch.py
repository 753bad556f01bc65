"""Splitting rows by length: every row occurs once, sums are nearly equal, and all micro-batches keep the budget."""

import itertools
import random

import pytest

from vectorlm.errors import ConfigError
from vectorlm.rl.micro_batch import PASS_TOKENS, Piece, partition, plan_micro_batches


def best_makespan(weights, num_parts):
    return min(
        max(sum(w for w, part in zip(weights, parts, strict=True) if part == p) for p in range(num_parts))
        for parts in itertools.product(range(num_parts), repeat=len(weights))
    )


def test_the_textbook_example():
    # Karmarkar and Karp's differencing of 8, 7, 6, 5, 4 gives a difference of 2; the best possible is 0.
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
    assert (group_of([0, 12, 0], 5).num_tokens, group_of([0, 0]).num_tokens) == (12, 0)


def group_of(lengths, shared=0, start=0):
    return Piece(tuple(range(start, start + len(lengths))), tuple(lengths), shared)


def one_row_each(lengths):
    return [group_of([length], start=row) for row, length in enumerate(lengths)]


def random_groups(generator, size):
    groups = []
    for index in range(generator.randint(0, 12)):
        shared = generator.randint(1, 20)
        lengths = [shared + generator.randint(0, 30) for _ in range(size)]
        groups.append(group_of(lengths, shared, index * size))
    return groups


def computed(pieces, packs):
    """Compute the number of tokens in a forward pass, from the definition."""
    lengths = [length for piece in pieces for length in piece.lengths]
    if not packs:
        return len(lengths) * max(lengths, default=0)
    return sum(
        piece.num_shared + sum(length - piece.num_shared for length in piece.lengths) for piece in pieces
    )


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("keep_groups_whole", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_budget_is_hard_and_all_ranks_have_as_many_micro_batches(num_ranks, keep_groups_whole, packs):
    generator = random.Random(0)
    size, budget = 3, 190
    for _ in range(30):
        groups = random_groups(generator, size)
        plan = plan_micro_batches(groups, num_ranks, budget, packs=packs, keep_groups_whole=keep_groups_whole)
        assert len({len(share) for share in plan}) == 1
        pieces = [piece for share in plan for part in share for piece in part]
        assert sorted(row for piece in pieces for row in piece.rows) == list(range(len(groups) * size))
        assert not keep_groups_whole or {len(piece.rows) for piece in pieces} <= {size}
        for part in itertools.chain(*plan):
            assert computed(part, packs) <= budget


def test_rows_of_like_length_share_a_padded_micro_batch():
    ((first, second),) = plan_micro_batches(one_row_each([9, 1, 9, 1]), 1, 18)
    assert [piece.rows for piece in first] == [(0,), (2,)]
    assert [piece.rows for piece in second] == [(1,), (3,)]


@pytest.mark.parametrize("size", [1, 4])
def test_short_rows_are_not_padded_beyond_what_a_pass_costs(size):
    groups = [
        group_of([length] * size, start=index * size) for index, length in enumerate([300, *[10] * 200])
    ]
    padded = (PASS_TOKENS // size) // 290
    (share,) = plan_micro_batches(groups, 1, 1_000_000, keep_groups_whole=True)
    assert [len(part) for part in share] == [1 + padded, 200 - padded]
    # Rows of one length need no padding, in any number.
    (share,) = plan_micro_batches(one_row_each([300] * 200), 1, 1_000_000)
    assert len(share) == 1


def test_packed_groups_stay_whole_where_the_ranks_are_equally_busy():
    groups = [group_of([50] * 4, 30, start) for start in range(0, 16, 4)]
    for share in plan_micro_batches(groups, 2, 1000, packs=True):
        ((first, second),) = share
        assert {first.rows, second.rows} <= {group.rows for group in groups}


def test_a_packed_group_is_cut_up_where_a_rank_would_wait_and_only_then():
    # The group has 20 + 4 * 100 tokens: two halves of 220 keep both ranks busy.
    plan = plan_micro_batches([group_of([120] * 4, 20)], 2, 1000, packs=True)
    assert [[piece.num_tokens for piece in part] for share in plan for part in share] == [[220], [220]]
    # The groups have 1000 + 4 tokens each. Halves would take 1002 each and not help the slower rank.
    plan = plan_micro_batches(
        [group_of([1001] * 4, 1000), group_of([1001] * 4, 1000, 4)], 2, 2000, packs=True
    )
    assert [[piece.num_tokens for piece in part] for share in plan for part in share] == [[1004], [1004]]


def test_a_group_beyond_the_budget_is_cut_into_the_fewest_pieces_that_fit():
    (share,) = plan_micro_batches([group_of([60] * 4, 50)], 1, 80, packs=True)
    assert [[piece.num_tokens for piece in part] for part in share] == [[70], [70]]
    # Each of the two rows keeps a copy of the 50 shared keys and values, which costs about 8 tokens.
    assert [[piece.num_kept for piece in part] for part in share] == [[78], [78]]


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(("keep", "needed"), [(False, 30), (True, 60)])
def test_a_row_beyond_the_budget_is_refused_with_numbers(keep, needed, packs):
    groups = [group_of([10, 10]), group_of([30, 30], start=2)]
    with pytest.raises(ConfigError, match=rf"rl\.max_tokens_per_micro_batch=29 .*\b{needed}\b"):
        plan_micro_batches(groups, 2, 29, packs=packs, keep_groups_whole=keep)


@pytest.mark.parametrize("packs", [True, False])
def test_a_pass_that_is_large_enough_takes_up_no_more_and_no_row_is_cut_for_it(packs):
    groups = [group_of([60] * 4, 20, start) for start in range(0, 16, 4)]
    (share,) = plan_micro_batches(groups, 1, 1000, enough=100, packs=packs)
    # A packed group takes 20 + 4 * 40 tokens and stays whole. Of padded rows of 60 tokens, only one fits.
    assert [len(part) for part in share] == ([1] * 4 if packs else [1] * 16)
    (share,) = plan_micro_batches(groups, 1, 200, enough=500, packs=packs)
    assert max(computed(part, packs) for part in share) <= 200
