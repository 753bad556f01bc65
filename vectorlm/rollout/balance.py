"""Rows shared out over ranks and micro-batches by their length."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

from vectorlm.errors import ConfigError

PASS_TOKENS = 1024
"""What a forward pass of its own is taken to cost besides its tokens: rows wait for it once they pad more than that."""


def partition(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Share indices out so that the parts' sums are nearly equal, by the largest differencing method.

    Source: Karmarkar and Karp 1982, "The differencing method of set partitioning".

    Args:
        weights: At least 0 each.
        num_parts: At least 1.

    Returns:
        `num_parts` lists of indices in ascending order, some of them perhaps empty.
    """
    ties = count()
    # Each entry is a partial solution: its parts from the heaviest to the lightest. The two entries with the largest
    # spread are joined, heavy parts with light ones, until one is left.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, weight in enumerate(weights):
        parts = [(weight, [index]), *((0, []) for _ in range(num_parts - 1))]
        heap.append((-_spread(parts), next(ties), parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [
            (heavy + light, mine + yours)
            for (heavy, mine), (light, yours) in zip(first, reversed(second), strict=True)
        ]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (-_spread(joined), next(ties), joined))
    if not heap:
        return [[] for _ in range(num_parts)]
    return [sorted(indices) for _, indices in heap[0][2]]


def plan_micro_batches(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, rows_per_unit: int = 1
) -> list[list[list[int]]]:
    """Share units out over ranks, and cut each rank's share into micro-batches within a hard budget.

    A unit is what must stay together: one row, or a group of `rows_per_unit` rows. A micro-batch of u units whose
    longest row has n tokens takes ``u rows_per_unit n`` tokens, padding included. Short units are not padded to the
    length of a long one where a pass of their own is cheaper: each micro-batch holds `PASS_TOKENS` of padding at most.

    Args:
        lengths: Tokens of the longest row of each unit.
        num_ranks: Number of ranks.
        max_tokens: What no micro-batch may exceed.
        rows_per_unit: Rows of each unit.

    Returns:
        For each rank as many micro-batches (lists of indices into `lengths`); some may be empty.

    Raises:
        ConfigError: A unit alone exceeds the budget.
    """
    longest = max(lengths, default=0) * rows_per_unit
    if longest > max_tokens:
        rows = "a row" if rows_per_unit == 1 else f"a group of {rows_per_unit} rows"
        raise ConfigError(
            f"rl.max_tokens_per_micro_batch={max_tokens} is less than {rows} takes: {longest} tokens. "
            f"Use {longest} or more, or shorter completions."
        )
    shares = [
        _within_budget(lengths, share, max_tokens // rows_per_unit, PASS_TOKENS // rows_per_unit)
        for share in partition(lengths, num_ranks)
    ]
    num_micro_batches = max(map(len, shares))
    for share in shares:
        # A rank with fewer has to take part in as many forward passes: cut its own smaller before adding empty ones.
        while len(share) < num_micro_batches:
            widest = max(share, key=len, default=[])
            if len(widest) < 2:
                share.append([])
                continue
            share.remove(widest)
            half = (len(widest) + 1) // 2
            share += [widest[:half], widest[half:]]
    return shares


def _within_budget(
    lengths: Sequence[int], indices: Sequence[int], max_tokens: int, max_padding: int
) -> list[list[int]]:
    """Fill micro-batches with rows of like length, the longest first."""
    found: list[list[int]] = []
    padding = 0
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        # The first row of a micro-batch is its longest.
        longest = lengths[found[-1][0]] if found else 0
        padding += longest - lengths[index]
        if found and (len(found[-1]) + 1) * longest <= max_tokens and padding <= max_padding:
            found[-1].append(index)
        else:
            found.append([index])
            padding = 0
    return found


def _spread(parts: Sequence[tuple[int, list[int]]]) -> int:
    return parts[0][0] - parts[-1][0]
