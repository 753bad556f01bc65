"""Checksums and finite checks of many tensors, in one operation and one read of the result."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from vectorlm.packages import is_trusted
from vectorlm.sampling.weights.inspection import Reading, checksum, words_of
from vectorlm.sampling.weights.plan import dtype_name, dtype_of


@dataclass(frozen=True)
class Found:
    """The findings about all tensors of a `Reader`, in their order."""

    sums: list[int]
    """The `checksum` of each tensor; meaningless if the reader was not asked for it."""
    sent_sums: list[int]
    """The `checksum` of each tensor in its second dtype; 0 for a tensor without one."""
    is_finite: list[bool]
    """Whether every number is finite in both dtypes; True for integers, and if the reader was not asked for it."""


class Reader:
    """A prepared list of tensors; `read` reads all their memory once.

    It keeps views of the tensors, so its owner must make another one after a tensor has moved.
    """

    def __init__(self, readings: Sequence[Reading], *, sums: bool = True, check_finite: bool = False) -> None:
        """Prepare the `readings`: `sums` asks for checksums, and `check_finite` whether all numbers are finite."""
        self._num_readings = len(readings)
        places: dict[tuple[type[Any], torch.device], list[int]] = defaultdict(list)
        for index, reading in enumerate(readings):
            places[_reader_of(reading), reading.rows.device].append(index)
        self._parts = [
            (indices, make([readings[index] for index in indices], sums, check_finite))
            for (make, _), indices in places.items()
        ]

    def read(self) -> Found:
        """Read the tensors as they are now."""
        if len(self._parts) == 1:
            return _found(self._parts[0][1].totals())
        whole = np.zeros((3, self._num_readings), np.int64)
        for places, part in self._parts:
            whole[:, places] = part.totals()
        return _found(whole)


def _found(totals: np.ndarray) -> Found:
    sums, sent_sums = totals[:2].view(np.uint64).tolist()
    return Found(sums, sent_sums, (totals[2] == 0).tolist())


def _reader_of(reading: Reading) -> type[Any]:
    if not is_trusted("checksums", reading.rows.device, kernel_differs):
        return _TorchReader
    from vectorlm.sampling.weights.kernel import KernelReader, can_read

    return KernelReader if can_read(reading) else _TorchReader


def kernel_differs(device: torch.device) -> str:
    """Compare the kernel with torch on small tensors; name the first kind that differs, or return an empty text."""
    from vectorlm.sampling.weights.kernel import PIECE, KernelReader

    for dtype, sent, shape in (
        (torch.float32, torch.bfloat16, (5, 6)),
        (torch.float32, None, (3, PIECE + 2)),
        (torch.bfloat16, None, (7, 3)),
        (torch.bfloat16, torch.float32, (9, 4)),
        (torch.float16, None, (4, 10)),
    ):
        rows = (torch.arange(math.prod(shape)) * 0.37 - 5).reshape(shape).to(dtype).to(device)
        rows[0, 0] = float("nan")
        for part in (rows, rows[1:, : shape[1] // 2]):
            totals = KernelReader([Reading(part, 3, 0, sent)], True, True).totals()
            expected = [checksum(part, 3), 0 if sent is None else checksum(part.to(sent), 3)]
            if (
                totals[:2].view(np.uint64).ravel().tolist() != expected
                or totals[2] != part.isnan().sum().item()
            ):
                return f"{dtype} {shape}, sent as {sent}"
    return ""


class _TorchReader:
    """The reader of one device's tensors, by torch's own operations."""

    def __init__(self, readings: Sequence[Reading], sums: bool, check_finite: bool) -> None:
        self._rows = [reading.rows.detach() for reading in readings]
        self._sizes = [reading.word_bytes for reading in readings]
        words = [words_of(rows, size) for rows, size in zip(self._rows, self._sizes, strict=True)]
        self._words = [
            table if table.untyped_storage()._cdata == rows.untyped_storage()._cdata else None
            for table, rows in zip(words, self._rows, strict=True)
        ]
        self._copied = [index for index, table in enumerate(self._words) if table is None]
        """The tensors whose words are not a view of them."""
        sent = ["" if reading.sent is None else dtype_name(reading.sent) for reading in readings]
        looked_at = [check_finite and rows.is_floating_point() and rows.numel() > 0 for rows in self._rows]
        self._options = (sent, [reading.sent_word_bytes for reading in readings], looked_at, sums)
        lengths = [*map(len, words)]
        lengths += [len(table) * bool(name) for table, name in zip(words, sent, strict=True)]
        ends = np.array([0, *accumulate(lengths)])
        first_rows = np.array([reading.first_row for reading in readings] * 2)
        rows = np.arange(ends[-1]) + np.repeat(first_rows - ends[:-1], lengths)
        device = self._rows[0].device
        self._weights = torch.from_numpy(2 * rows + 1).to(device)
        self._together = torch.zeros_like(self._weights)
        """The sums of the rows of all tensors, and of those in a second dtype."""
        self._parts = self._together.split(lengths)
        self._ends = torch.from_numpy(ends).to(device)

    def totals(self) -> np.ndarray:
        """Return checksums, checksums in the second dtype, and 1 for a number that is not finite: int64 [3, N]."""
        for index in self._copied:
            self._words[index] = words_of(self._rows[index], self._sizes[index])
        words: list[torch.Tensor] = self._words  # type: ignore[assignment]
        found: torch.Tensor = torch.ops.vectorlm.read(
            self._together, self._parts, self._rows, words, self._weights, self._ends, *self._options
        )
        for index in self._copied:
            self._words[index] = None
        return found.cpu().numpy()


_LIBRARY = torch.library.Library("vectorlm", "FRAGMENT")
_LIBRARY.define(
    "read(Tensor(a!) together, Tensor(b!)[] parts, Tensor[] rows, Tensor[] words, Tensor weights, Tensor ends, "
    "str[] sent, int[] sent_sizes, bool[] looked_at, bool sums) -> Tensor"
)


@torch.no_grad()
def _read(
    together: torch.Tensor,
    parts: list[torch.Tensor],
    rows: list[torch.Tensor],
    words: list[torch.Tensor],
    weights: torch.Tensor,
    ends: torch.Tensor,
    sent: list[str],
    sent_sizes: list[int],
    looked_at: list[bool],
    sums: bool,
) -> torch.Tensor:
    """Do the work of `_TorchReader.totals`, one tensor after the other, because further reads then hit the cache."""
    num = len(rows)
    extremes: list[torch.Tensor] = []
    places = []
    dtypes = {name: dtype_of(name) for name in {*sent} - {""}}
    for index, (tensor, of_rows) in enumerate(zip(rows, words, strict=True)):
        if sums:
            torch.sum(of_rows, 1, out=parts[index])
        if sent[index]:
            tensor = tensor.to(dtypes[sent[index]])
            if sums:
                torch.sum(words_of(tensor, sent_sizes[index]), 1, out=parts[num + index])
        if looked_at[index]:
            extremes += torch.aminmax(tensor)
            places.append(index)
    # Integers of 64 bits wrap, and differences of sums that have wrapped are right modulo 2**64.
    running = torch.cat([weights.new_zeros(1), together.mul_(weights).cumsum_(0)])[ends]
    wrong = weights.new_zeros(num)
    if extremes:
        finite = torch.stack(extremes).isfinite().view(-1, 2).all(1)
        wrong[torch.tensor(places, device=weights.device)] = 1 - finite.long()
    return torch.cat([running.diff(), wrong]).view(3, num)


_LIBRARY.impl("read", _read, "CompositeExplicitAutograd")
