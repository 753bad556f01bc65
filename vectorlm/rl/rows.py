"""Micro-batches cut out of the rows of a step, and rows put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vectorlm.ranks.topology import Topology
from vectorlm.rollout.balance import plan_micro_batches
from vectorlm.rollout.batch import RolloutBatch

RowFunction = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""From input_ids and attention_mask [b, t], and the first token that is trained on, to float [b, t]."""


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, for one forward pass of this rank."""

    rows: torch.Tensor
    """int64 [b], indices into the batch."""
    length: int
    """Tokens of the longest of them."""
    first: int
    """The first token that is trained on in any of them, at least 1."""
    is_filler: bool
    """Whether these rows only keep this rank in step with the others, and count nowhere."""
    device: str
    """Where the forward pass is computed."""

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
    keep_groups_whole: bool,
) -> list[MicroBatch]:
    """Return this rank's micro-batches of some groups; every rank gets as many.

    All ranks hold the whole batch and come to the same plan, so nothing has to be exchanged, and an error is raised by
    all of them.

    Args:
        batch: The rows of the step.
        groups: Which groups to share out.
        topology: This rank's place.
        max_tokens: What no micro-batch may exceed, padding included.
        keep_groups_whole: Whether the rows of a group must meet in one micro-batch.

    Raises:
        ConfigError: A row, or a group that is kept whole, exceeds the budget.
    """
    size = batch.rows_per_group
    rows = [group * size + column for group in groups for column in range(size)]
    per_unit = size if keep_groups_whole else 1
    units = [rows[start : start + per_unit] for start in range(0, len(rows), per_unit)]
    lengths = [max(batch.num_tokens[row] for row in unit) for unit in units]
    plan = plan_micro_batches(lengths, topology.world_size, max_tokens, per_unit)
    return [
        _micro_batch(batch, [row for unit in part for row in units[unit]], units[0], topology.device)
        for part in plan[topology.rank]
    ]


def map_rows(
    batch: RolloutBatch,
    function: RowFunction,
    topology: Topology,
    *,
    max_tokens: int,
) -> torch.Tensor:
    """Apply a model to every row, shared out over the ranks; called on all ranks.

    Args:
        batch: The rows of the step.
        function: What to apply.
        topology: This rank's place.
        max_tokens: What no forward pass may exceed, padding included.

    Returns:
        float32 [B, T] on the CPU, the same on all ranks; 0 outside the rows.
    """
    found = torch.zeros(batch.input_ids.shape, device=topology.device)
    groups = range(len(batch.rewards))
    parts = micro_batches_of(batch, groups, topology, max_tokens=max_tokens, keep_groups_whole=False)
    with torch.no_grad():
        for part in parts:
            values = function(part.cut(batch.input_ids), part.cut(batch.attention_mask), part.first)
            if not part.is_filler:
                found[part.rows, : part.length] = values.float()
    # Every row is one rank's: adding zeros of the others changes no bit.
    if topology.world_size > 1:
        dist.all_reduce(found)
    return torch.where(batch.attention_mask.bool(), found.cpu(), 0.0)


def _micro_batch(batch: RolloutBatch, rows: list[int], spare: list[int], device: str) -> MicroBatch:
    used = rows or spare
    length = max(batch.num_tokens[row] for row in used)
    # Where nothing is trained on, the last token alone keeps the forward pass whole.
    first = min((batch.first_trained[row] for row in used), default=length - 1)
    return MicroBatch(torch.tensor(used), length, max(min(first, length - 1), 1), not rows, device)
