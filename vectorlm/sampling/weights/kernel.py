"""A Triton kernel that sums the memory of many tensors; `vectorlm.sampling.weights.reader` uses it on CUDA."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from vectorlm.sampling.weights.inspection import Reading, widest_word

PIECE = 65536
"""Elements that one program reads."""
BLOCK = 1024
"""Elements that a program reads at a time."""
FLOATS: dict[torch.dtype, Any] = {
    torch.float32: (tl.float32, tl.int32),
    torch.bfloat16: (tl.bfloat16, tl.int16),
    torch.float16: (tl.float16, tl.int16),
}
"""The dtypes that the kernel reads and casts to, each with the integer of the same size."""


@triton.jit
def _words(bits, column, weight, per_word, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what each number adds to the checksum: its bits at their place in a word, times the row's weight."""
    place = (column & (per_word - 1)).to(tl.int64)
    # A word is a signed integer, so only its last number has a sign.
    signed = bits.to(tl.int64)
    value = tl.where(place == per_word - 1, signed, signed & ((1 << BITS) - 1))
    return (value << (place * BITS)) * weight


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    table,
    found,
    first_piece,
    num_pieces,
    HELD: tl.constexpr,
    HELD_INTEGER: tl.constexpr,
    SENT: tl.constexpr,
    SENT_INTEGER: tl.constexpr,
    IS_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the two checksums of one piece, and the count of its numbers that are not finite in the dtype SENT."""
    piece = first_piece + tl.program_id(0)
    entry = table + 8 * piece
    address = tl.load(entry).to(tl.pointer_type(HELD))
    begin, count, width = (
        tl.load(entry + 1).to(tl.int32),
        tl.load(entry + 2).to(tl.int32),
        tl.load(entry + 3).to(tl.int32),
    )
    stride, first_row = tl.load(entry + 4), tl.load(entry + 5)
    per_word, sent_per_word = tl.load(entry + 6).to(tl.int32), tl.load(entry + 7).to(tl.int32)
    held_sum = tl.zeros([BLOCK], tl.int64)
    sent_sum = tl.zeros([BLOCK], tl.int64)
    wrong = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        # 32 bits, because a division of 64 bits would take longer than the read.
        row = (begin + lane) // width
        column = (begin + lane) - row * width
        numbers = tl.load(address + row.to(tl.int64) * stride + column, mask=lane < count, other=0.0)
        weight = 2 * (first_row + row) + 1
        held_sum += _words(
            numbers.to(HELD_INTEGER, bitcast=True), column, weight, per_word, HELD.primitive_bitwidth
        )
        sent = numbers.to(SENT)
        if IS_CAST:
            bits = sent.to(SENT_INTEGER, bitcast=True)
            sent_sum += _words(bits, column, weight, sent_per_word, SENT.primitive_bitwidth)
        # NaN is not below anything.
        wrong += 1 - (tl.abs(sent.to(tl.float32)) < float("inf")).to(tl.int64)
    tl.store(found + piece, tl.sum(held_sum, axis=0))
    tl.store(found + num_pieces + piece, tl.sum(sent_sum, axis=0))
    tl.store(found + 2 * num_pieces + piece, tl.sum(wrong, axis=0))


def can_read(reading: Reading) -> bool:
    """Return whether the kernel knows the dtypes, and reaches each row by a stride."""
    return (
        reading.rows.dtype in FLOATS
        and (reading.sent is None or reading.sent in FLOATS)
        and reading.rows.numel() > 0
        and _table_of(reading.rows) is not None
    )


class KernelReader:
    """The reader of one device's tensors: one launch for each pair of dtypes, and one read."""

    def __init__(self, readings: Sequence[Reading], sums: bool, check_finite: bool) -> None:
        """Prepare readings that `can_read` accepts; the kernel always computes `sums`."""
        by_dtypes: dict[tuple[torch.dtype, torch.dtype | None], list[int]] = defaultdict(list)
        for index, reading in enumerate(readings):
            by_dtypes[reading.rows.dtype, reading.sent].append(index)
        self._kept = [reading.rows.detach() for reading in readings]
        self._order = np.array([index for indices in by_dtypes.values() for index in indices])
        pieces = [_pieces_of(readings[index]) for index in self._order]
        device = readings[0].rows.device
        self._table = torch.from_numpy(np.concatenate(pieces)).to(device)
        ends = list(accumulate(map(len, pieces), initial=0))
        self._ends = torch.tensor(ends, device=device)
        self._launches = []
        done = 0
        for (held, sent), indices in by_dtypes.items():
            first, end = ends[done], ends[done + len(indices)]
            self._launches.append((first, end - first, held, sent))
            done += len(indices)
        self._check_finite = check_finite

    def totals(self) -> np.ndarray:
        """Return checksums, checksums in the second dtype, and counts of not finite numbers: int64 [3, N]."""
        num_pieces = len(self._table)
        found = torch.empty(3, num_pieces, dtype=torch.int64, device=self._table.device)
        with torch.cuda.device(found.device) if found.is_cuda else nullcontext():
            for first, count, held, sent in self._launches:
                dtypes = (*FLOATS[held], *FLOATS[sent or held])
                _read[(count,)](self._table, found, first, num_pieces, *dtypes, sent is not None, BLOCK)
        # Integers of 64 bits wrap, and differences of sums that have wrapped are right modulo 2**64.
        running = torch.nn.functional.pad(found.cumsum_(1), (1, 0))[:, self._ends].diff()
        totals = np.empty((3, len(self._order)), np.int64)
        totals[:, self._order] = running.cpu().numpy()
        totals[2] *= self._check_finite
        return totals


def _table_of(rows: torch.Tensor) -> torch.Tensor | None:
    """Return `rows` as a table whose rows are contiguous, without a copy; None if that is impossible."""
    table = rows.detach().reshape(len(rows) if rows.ndim else 1, -1)
    is_in_place = table.untyped_storage()._cdata == rows.untyped_storage()._cdata
    return table if is_in_place and (table.stride(1) == 1 or table.shape[1] == 1) else None


def _pieces_of(reading: Reading) -> np.ndarray:
    """Return the rows of the kernel's table for one tensor, int64 [pieces, 8]."""
    table = _table_of(reading.rows)
    assert table is not None
    num_rows, width = table.shape
    size, sent_size = table.element_size(), (reading.sent or table.dtype).itemsize
    word_bytes = reading.word_bytes or widest_word(width * size)
    sent_word_bytes = reading.sent_word_bytes or widest_word(width * sent_size)
    begins = np.arange(0, num_rows * width, PIECE)
    first_rows, columns = begins // width, begins % width
    pieces = np.empty((len(begins), 8), np.int64)
    pieces[:, 0] = table.data_ptr() + first_rows * table.stride(0) * size
    pieces[:, 1], pieces[:, 2] = columns, np.minimum(PIECE, num_rows * width - begins)
    pieces[:, 3], pieces[:, 4], pieces[:, 5] = width, table.stride(0), reading.first_row + first_rows
    pieces[:, 6], pieces[:, 7] = word_bytes // size, sent_word_bytes // sent_size
    return pieces
