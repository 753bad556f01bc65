"""Micro-batches: the rows of a step, balanced over the ranks and cut to a token budget."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist

from vectorlm.algorithms.batch import RolloutBatch
from vectorlm.dist.topology import Topology
from vectorlm.errors import ConfigError

PASS_TOKENS = 1024
"""The fixed cost of a forward pass, in tokens: a micro-batch that would hold more padding is split."""
RowFunction = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""From input_ids and attention_mask [b, t], and the first token that is trained on, to float [b, t]."""


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, for one forward pass of this rank."""

    rows: torch.Tensor
    """int64 [b], indices into the batch."""
    length: int
    """Tokens of the longest row."""
    first: int
    """The first token that is trained on in any row, at least 1."""
    is_filler: bool
    """Whether the rows only let this rank join the forward passes of the others, and count nowhere."""
    device: str
    """The device of the forward pass."""

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Return these rows of a [B, T] tensor, on the device, without padding that none of them needs."""
        return x[self.rows, : self.length].to(self.device)

    def mask_of(self, batch: RolloutBatch) -> torch.Tensor:
        """Return bool [b, t], the tokens that are trained on."""
        mask = self.cut(batch.mask)
        return torch.zeros_like(mask) if self.is_filler else mask


def micro_batches_of(
    batch: RolloutBatch,
    groups: Sequence[int],
    topology: Topology,
    *,
    max_tokens: int,
    keep_groups_whole: bool = False,
) -> list[MicroBatch]:
    """Return this rank's micro-batches of some groups; every rank gets the same number.

    All ranks hold the whole batch and compute the same plan, so nothing is exchanged, and all raise the same error.

    Raises:
        ConfigError: A row, or a group that is kept whole, exceeds `max_tokens`.
    """
    size = batch.rows_per_group
    rows = [group * size + column for group in groups for column in range(size)]
    per_unit = size if keep_groups_whole else 1
    units = [rows[start : start + per_unit] for start in range(0, len(rows), per_unit)]
    lengths = [max(batch.num_tokens[row] for row in unit) for unit in units]
    plan = plan_micro_batches(lengths, topology.world_size, max_tokens, per_unit)
    return [
        _micro_batch(batch, [row for unit in chosen for row in units[unit]], units[0], topology.device)
        for chosen in plan[topology.rank]
    ]


def map_rows(
    batch: RolloutBatch, function: RowFunction, topology: Topology, *, max_tokens: int
) -> torch.Tensor:
    """Apply a model to every row, split over the ranks; called on all ranks.

    Returns:
        float32 [B, T] on the CPU, the same on all ranks; 0 outside the rows.
    """
    found = torch.zeros(batch.input_ids.shape, device=topology.device)
    with torch.no_grad():
        for micro_batch in micro_batches_of(
            batch, range(len(batch.rewards)), topology, max_tokens=max_tokens
        ):
            input_ids, attention_mask = map(micro_batch.cut, (batch.input_ids, batch.attention_mask))
            values = function(input_ids, attention_mask, micro_batch.first)
            if not micro_batch.is_filler:
                found[micro_batch.rows, : micro_batch.length] = values.float()
    # Each row was computed by one rank: adding the zeros of the others changes no bit.
    if topology.world_size > 1:
        dist.all_reduce(found)
    return torch.where(batch.attention_mask.bool(), found.cpu(), 0.0)


def plan_micro_batches(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, rows_per_unit: int = 1
) -> list[list[list[int]]]:
    """Balance units over the ranks, and cut the units of each rank into micro-batches within a token budget.

    A unit stays together: one row, or a group of `rows_per_unit` rows. A micro-batch of u units, the longest row of
    which has n tokens, takes ``u rows_per_unit n`` tokens, padding included. It holds at most `PASS_TOKENS` of padding.

    Args:
        lengths: Tokens of the longest row of each unit.
        num_ranks: Number of ranks.
        max_tokens: Largest micro-batch.
        rows_per_unit: Rows of each unit.

    Returns:
        For each rank the same number of micro-batches (lists of indices into `lengths`); some may be empty.

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
    plan = [
        _within_budget(lengths, units, max_tokens // rows_per_unit, PASS_TOKENS // rows_per_unit)
        for units in partition(lengths, num_ranks)
    ]
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
    # Each entry is a partial solution: its subsets from the heaviest to the lightest. The two entries with the largest
    # differences are joined, heavy subsets with light ones, until one entry is left.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, weight in enumerate(weights):
        subsets = [(weight, [index]), *((0, []) for _ in range(num_subsets - 1))]
        heap.append((subsets[-1][0] - subsets[0][0], next(ties), subsets))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [
            (heavy + light, mine + yours)
            for (heavy, mine), (light, yours) in zip(first, reversed(second), strict=True)
        ]
        joined.sort(key=lambda subset: -subset[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], next(ties), joined))
    if not heap:
        return [[] for _ in range(num_subsets)]
    return [sorted(indices) for _, indices in heap[0][2]]


def _within_budget(
    lengths: Sequence[int], indices: Sequence[int], max_tokens: int, max_padding: int
) -> list[list[int]]:
    """Fill micro-batches with rows of similar length, the longest first."""
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


def _micro_batch(batch: RolloutBatch, rows: list[int], spare: list[int], device: str) -> MicroBatch:
    """Return the micro-batch of `rows`, or a filler of `spare` rows."""
    used = rows or spare
    length = max(batch.num_tokens[row] for row in used)
    # Where nothing is trained on, the logits of the last token are computed.
    first = min((batch.first_trained[row] for row in used), default=length - 1)
    return MicroBatch(torch.tensor(used), length, max(min(first, length - 1), 1), not rows, device)
