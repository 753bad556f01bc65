"""What a rank exports of a weight set, for the engines of its node to pull."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vectorlm.weights.checksum import row_sums
from vectorlm.weights.handles import Handle, handle_of
from vectorlm.weights.module_source import HeldRows, ModuleSource
from vectorlm.weights.plan import Layout, dtype_of


@dataclass(frozen=True)
class Export:
    """Rows of one tensor, where the rank that sends them holds them."""

    name: str
    """The tensor's name in the trainer."""
    first_row: int
    """Where the rows start in the whole tensor."""
    handle: Handle
    """Leads to the rows, in the trainer's dtype."""


class ExportedRows:
    """The rows of one weight set that a rank has exported; kept, with their memory, until something has moved.

    Shards are exported where they lie. Rows that are computed on their way (merged LoRA), and those that are not
    contiguous, get memory of their own, in the engine's dtype, which every update fills.
    """

    def __init__(self, writes: Mapping[str, HeldRows], layout: Layout) -> None:
        """Export the rows; on CPU this moves their storages into shared memory."""
        dtypes = {slot.name: dtype_of(slot.dtype) for slot in layout.slots}
        self._staged = {
            name: torch.empty(write.rows.shape, dtype=dtypes[name], device=write.rows.device)
            for name, write in writes.items()
            if _is_staged(write)
        }
        rows = {name: self._staged.get(name, write.rows) for name, write in writes.items()}
        self.exports: Sequence[Export] = [
            Export(name, write.first_row, handle_of(rows[name]))
            for name, write in writes.items()
            if write.rows.numel()
        ]
        # As long as these are kept, no other tensor can come to lie at their addresses.
        self._kept = rows
        self._places = {name: _place(write) for name, write in writes.items()}

    def are_current(self, writes: Mapping[str, HeldRows]) -> bool:
        """Whether what was exported is still what would be sent."""
        return self._places == {name: _place(write) for name, write in writes.items()}

    def publish(self, source: ModuleSource, layout: Layout, with_checksums: bool) -> Sequence[int]:
        """Fill what is computed, and sum the rows as the engine will hold them, one tensor at a time."""
        sums: dict[str, tuple[torch.Tensor, int]] = {}
        for slot in layout.slots:
            write, staged = source.writes[slot.name], self._staged.get(slot.name)
            rows = write.rows
            if staged is not None:
                rows = staged.copy_(rows if write.change is None else write.change(rows))
            if with_checksums and not source.has_summed(slot.name):
                sums[slot.name] = row_sums(rows.to(dtype_of(slot.dtype)), slot.word_bytes), write.first_row
        return source.with_known_sums(layout, sums) if with_checksums else []


def _is_staged(write: HeldRows) -> bool:
    return write.change is not None or not write.rows.is_contiguous()


def _place(write: HeldRows) -> tuple[Any, ...]:
    rows = write.rows
    where = None if _is_staged(write) else (rows.data_ptr(), rows.dtype)
    return where, rows.shape, write.first_row
