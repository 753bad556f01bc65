"""Rows of unequal length as two flat arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ABSENT = -1
"""The length of a row that is None."""


@dataclass(frozen=True)
class Ragged:
    """Rows end to end; a row may be None."""

    lengths: np.ndarray
    """int32 [rows], `ABSENT` where a row is None."""
    values: np.ndarray
    """All rows end to end."""

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any] | None], dtype: Any) -> Ragged:
        """Lay `rows` of numbers end to end."""
        rows = list(rows)
        lengths = ints(ABSENT if row is None else len(row) for row in rows)
        return cls(lengths, np.fromiter((value for row in rows for value in row or ()), dtype))

    @classmethod
    def of_texts(cls, texts: Iterable[str | None]) -> Ragged:
        """Lay texts end to end, in UTF-8; what no text can hold (lone surrogates) passes too."""
        encoded = [None if text is None else text.encode("utf-8", "surrogatepass") for text in texts]
        lengths = ints(ABSENT if text is None else len(text) for text in encoded)
        return cls(lengths, np.frombuffer(b"".join(text or b"" for text in encoded), np.uint8))

    def rows(self, first: int = 0, last: int | None = None) -> list[np.ndarray | None]:
        """Return rows `first` to `last` (exclusive), each a view."""
        ends = np.cumsum(np.maximum(self.lengths, 0))
        bounds = zip(self.lengths[first:last].tolist(), ends[first:last].tolist(), strict=True)
        return [None if length == ABSENT else self.values[end - length : end] for length, end in bounds]

    def texts(self, first: int = 0, last: int | None = None) -> list[str | None]:
        """Return rows `first` to `last` (exclusive) as texts."""
        rows = self.rows(first, last)
        return [None if row is None else row.tobytes().decode("utf-8", "surrogatepass") for row in rows]


def ints(values: Iterable[int]) -> np.ndarray:
    """Return int32 numbers as an array."""
    return np.fromiter(values, np.int32)
