"""Micro-batches: the rows of a step, balanced over the ranks and cut to a token budget."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, pairwise
from typing import Any

import torch
import torch.distributed as dist

from vectorlm.algorithms.batch import RolloutBatch
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.rl.settings import CPU_PASS_TOKENS
from vectorlm.train.packing import Rows, num_needed, num_shared, to_device

PASS_TOKENS = 1024
"""Fixed cost of a forward pass, in tokens. A micro-batch with more padding is split."""
ROWS_PER_TOKEN = 12
"""Number of shared tokens whose keys and values, copied for a row, cost as much as one computed token."""
BALANCED = 1.02
"""Largest ratio of the busiest rank's tokens to a fair share at which groups are not split further."""
RowFunction = Callable[[Rows], torch.Tensor]
"""Computes float [b, t], or several of these [n, b, t], from the rows of a forward pass."""


@dataclass(frozen=True)
class Piece:
    """Rows of one group that stay together in a forward pass."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    """Number of computed tokens of each row; 0 for a row that is not computed."""
    num_shared: int = 0
    """Number of tokens at the beginning that are computed once for all rows."""

    @cached_property
    def longest(self) -> int:
        """Number of computed tokens of the longest row."""
        return max(self.lengths)

    @cached_property
    def num_tokens(self) -> int:
        """Number of computed tokens if rows are packed."""
        own = sum(length - self.num_shared for length in self.lengths if length)
        return own + (self.num_shared if any(self.lengths) else 0)

    @property
    def num_kept(self) -> int:
        """Memory of the activations, in tokens: every row has a copy of the shared keys and values."""
        return self.num_tokens + len(self.rows) * self.num_shared // ROWS_PER_TOKEN

    def split(self, count: int) -> list[Piece]:
        """Cut into `count` pieces of nearly equally many rows."""
        bounds = [len(self.rows) * index // count for index in range(count + 1)]
        return [
            Piece(self.rows[start:end], self.lengths[start:end], self.num_shared if end - start > 1 else 0)
            for start, end in pairwise(bounds)
        ]


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, for one forward pass of this rank."""

    rows: torch.Tensor
    """int64 [b], indices into the batch."""
    length: int
    """Number of tokens of the longest row."""
    num_tokens: int
    """Number of tokens that the forward pass computes, padding included."""
    is_filler: bool
    """Whether the rows do not count: they only let this rank join the forward passes of the other ranks."""
    device: str
    """The device of the forward pass."""

    def of(self, batch: RolloutBatch) -> MicroBatch:
        """Return the same rows of another batch, where they may be longer."""
        return replace(self, length=max(batch.num_tokens[row] for row in self.rows.tolist()))

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Return these rows of a [B, T] tensor, on the device, without padding that no row needs."""
        return to_device(self._rows_of(x), self.device)

    def mask_of(self, batch: RolloutBatch) -> torch.Tensor:
        """Return bool [b, t], the tokens that are trained on."""
        return self.cut(batch.mask) & (not self.is_filler)

    def inputs_of(self, batch: RolloutBatch) -> Rows:
        """Return the rows of the forward pass; a filler requests no token, and a packed pass then computes only one."""
        input_ids, attention_mask = map(self._rows_of, (batch.input_ids, batch.attention_mask))
        is_asked = self._rows_of(batch.mask) & (not self.is_filler)
        groups = (self.rows // batch.rows_per_group).tolist()
        starts = None if batch.turn_starts is None else self._rows_of(batch.turn_starts)
        images = None if batch.images is None else [batch.images[row] for row in self.rows.tolist()]
        routes, replayed = map(self._arrays_of, (batch.routes, batch.replayed))
        options: dict[str, Any] = {
            "turn_starts": starts,
            "images": images,
            "routes": routes,
            "replayed": replayed,
        }
        return Rows(input_ids, attention_mask, is_asked, groups, **options)

    def _arrays_of(self, arrays: Sequence[Any] | None) -> list[Any] | None:
        return None if arrays is None else [arrays[row] for row in self.rows.tolist()]

    def _rows_of(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.rows, : self.length]


def micro_batches_of(
    batch: RolloutBatch,
    groups: Sequence[int],
    topology: Topology,
    *,
    max_tokens: int,
    packs: bool = False,
    keep_groups_whole: bool = False,
) -> tuple[list[MicroBatch], int]:
    """Return this rank's micro-batches of some groups, and the number of tokens of all ranks.

    Every rank gets the same number of micro-batches. All ranks have the whole batch and compute the same plan, without
    any exchange, and raise the same errors. Ranks that share passes have the same micro-batches, and `max_tokens` is
    the limit of all these ranks together. With `packs`, the common beginning of a group counts once per piece.

    Raises:
        ConfigError: A row, or a group that is kept whole, exceeds `max_tokens`.
    """
    size = batch.rows_per_group
    lengths_of_rows = batch.num_tokens
    needed = num_needed(batch.mask) if packs else lengths_of_rows
    pieces = []
    for group in groups:
        rows = slice(group * size, (group + 1) * size)
        lengths = needed[rows]
        is_used = torch.tensor(lengths) > 0
        is_alike = batch.images is None or all(
            images == batch.images[rows][0] for images in batch.images[rows]
        )
        can_share = packs and is_alike
        shared = num_shared(batch.input_ids[rows][is_used], [n for n in lengths if n]) if can_share else 0
        pieces.append(Piece(tuple(range(rows.start, rows.stop)), tuple(lengths), shared))
    plan = plan_micro_batches(
        pieces,
        topology.num_data_shares,
        max_tokens,
        enough=None if topology.is_cuda else CPU_PASS_TOKENS,
        packs=packs,
        keep_groups_whole=keep_groups_whole,
    )
    computed = [piece for share in plan for part in share for piece in part]
    # A rank without rows repeats the smallest piece.
    spare = min(computed, key=lambda piece: piece.num_tokens)
    mine = []
    for part in plan[topology.data_share]:
        chosen = part or [spare]
        indices = [row for piece in chosen for row in piece.rows]
        length = max(lengths_of_rows[row] for row in indices)
        num_tokens = sum(piece.num_tokens for piece in chosen) if packs else length * len(indices)
        mine.append(MicroBatch(torch.tensor(indices), length, num_tokens, not part, topology.device))
    return mine, sum(piece.num_tokens for piece in computed)


def map_rows(
    batch: RolloutBatch,
    function: RowFunction,
    topology: Topology,
    *,
    max_tokens: int,
    packs: bool = False,
    groups: Sequence[int] | None = None,
    note: Callable[[MicroBatch], None] = lambda micro_batch: None,
) -> torch.Tensor:
    """Apply a model to every row, or to the rows of some `groups`, split over the ranks; called on all ranks.

    `note` is called after each pass of this rank whose rows count.

    Returns:
        float32 [B, T], or [n, B, T], on the CPU, the same on all ranks; 0 outside the rows.
    """
    found = None
    with torch.no_grad():
        groups = range(len(batch.rewards)) if groups is None else groups
        micro_batches, _ = micro_batches_of(batch, groups, topology, max_tokens=max_tokens, packs=packs)
        for micro_batch in micro_batches:
            values = function(micro_batch.inputs_of(batch))
            if found is None:
                found = torch.zeros((*values.shape[:-2], *batch.input_ids.shape), device=topology.device)
            if not micro_batch.is_filler:
                rows = to_device(micro_batch.rows, topology.device)
                found[..., rows, : micro_batch.length] = values.float()
                note(micro_batch)
    assert found is not None, "every rank has at least a filler"
    # Each row was computed by one rank, or by all ranks that share it. Adding the others' zeros changes no bit.
    if topology.world_size > 1:
        dist.all_reduce(found)
        found /= topology.ranks_per_share
    return torch.where(batch.attention_mask.bool(), found.cpu(), 0.0)


def plan_micro_batches(
    groups: Sequence[Piece],
    num_ranks: int,
    max_tokens: int,
    *,
    enough: int | None = None,
    packs: bool = False,
    keep_groups_whole: bool = False,
) -> list[list[list[Piece]]]:
    """Balance groups over the ranks, and cut every rank's share into micro-batches within a token budget.

    With `packs`, rows stay with their group, unless parts of groups keep the ranks more equally busy although every
    part computes the common beginning again. Padded rows are distributed one by one. Each counts as many tokens as the
    longest row of its micro-batch, which has at most `PASS_TOKENS` of padding.

    A micro-batch with `enough` tokens takes no further piece. Every rank gets the same number of micro-batches; some
    may be empty.

    Raises:
        ConfigError: A row, or a group that is kept whole, exceeds `max_tokens`.
    """
    largest = max((len(group.rows) for group in groups), default=1)
    if keep_groups_whole or (packs and num_ranks == 1):
        counts = [1]
    elif packs:
        counts = [*(1 << power for power in range((largest - 1).bit_length())), largest]
    else:
        counts = [largest]
    shares, busiest = [], math.inf
    for number in counts:
        cut = [
            piece
            for group in groups
            for piece in _fitting(group, number, max_tokens, packs, keep_groups_whole)
        ]
        weights = [piece.num_tokens for piece in cut]
        found = [[cut[index] for index in share] for share in partition(weights, num_ranks)]
        tokens = [sum(piece.num_tokens for piece in share) for share in found]
        if max(tokens) < busiest:
            shares, busiest = found, max(tokens)
        # Smaller pieces would only increase the sum.
        if max(tokens) <= BALANCED * sum(tokens) / num_ranks:
            break
    plan = [_within_budget(share, min(max_tokens, enough or max_tokens), packs) for share in shares]
    num_micro_batches = max(map(len, plan))
    for micro_batches in plan:
        # All ranks make the same number of forward passes: split micro-batches before adding empty ones.
        while len(micro_batches) < num_micro_batches:
            widest = max(micro_batches, key=len, default=[])
            if len(widest) < 2:
                micro_batches.append([])
                continue
            micro_batches.remove(widest)
            half = (len(widest) + 1) // 2
            micro_batches += [widest[:half], widest[half:]]
    return plan


def partition(weights: Sequence[int], num_subsets: int) -> list[list[int]]:
    """Partition indices into subsets of nearly equal weight, by the largest differencing method.

    Source: Karmarkar and Karp 1982, "The differencing method of set partitioning".

    Returns:
        `num_subsets` lists of indices in ascending order; some may be empty.
    """
    ties = count()
    # An entry is a partial solution: its subsets from the heaviest to the lightest, without the empty ones. The two
    # entries with the largest differences are joined, heavy subsets with light ones, until one entry is left.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, weight in enumerate(weights):
        heap.append((-weight if num_subsets > 1 else 0, next(ties), [(weight, [index])]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        second.reverse()
        # The heaviest of `first` join empty subsets of `second`, as far as there are any.
        alone = min(num_subsets - len(second), len(first))
        num_pairs = len(first) - alone
        joined = first[:alone]
        for (heavy, mine), (light, yours) in zip(first[alone:], second[:num_pairs], strict=True):
            joined.append((heavy + light, mine + yours))
        joined += second[num_pairs:]
        joined.sort(key=lambda subset: -subset[0])
        lightest = joined[-1][0] if len(joined) == num_subsets else 0
        heapq.heappush(heap, (lightest - joined[0][0], next(ties), joined))
    found = [sorted(indices) for _, _, subsets in heap for _, indices in subsets]
    return found + [[] for _ in range(num_subsets - len(found))]


def _fitting(group: Piece, count: int, max_tokens: int, packs: bool, keep_groups_whole: bool) -> list[Piece]:
    """Cut a group into `count` pieces, or into more if the budget requires it."""
    most = len(group.rows)
    for number in range(min(count, most), most + 1):
        pieces = group.split(number)
        largest = max(piece.num_kept if packs else piece.longest * len(piece.rows) for piece in pieces)
        if largest <= max_tokens:
            return pieces
        if keep_groups_whole:
            break
    rows = f"a group of {most} rows" if keep_groups_whole and most > 1 else "a row"
    raise ConfigError(
        f"rl.max_tokens_per_micro_batch={max_tokens} must be at least {largest}, the tokens of {rows}. "
        f"Use {largest} or more, or shorter completions."
    )


def _within_budget(pieces: Sequence[Piece], max_tokens: int, packs: bool) -> list[list[Piece]]:
    """Fill micro-batches, the longest rows first; padded rows stay with rows of similar length."""
    found: list[list[Piece]] = []
    num_rows = num_tokens = 0
    for piece in sorted(pieces, key=lambda it: (-(it.num_kept if packs else it.longest), it.rows)):
        num_rows, num_tokens = num_rows + len(piece.rows), num_tokens + piece.num_tokens
        # The first piece of a micro-batch has the micro-batch's longest row.
        padded = num_rows * found[-1][0].longest if found else 0
        kept = sum(other.num_kept for other in found[-1]) + piece.num_kept if found and packs else padded
        if found and kept <= max_tokens and (packs or padded - num_tokens <= PASS_TOKENS):
            found[-1].append(piece)
        else:
            found.append([piece])
            num_rows, num_tokens = len(piece.rows), piece.num_tokens
    return found
