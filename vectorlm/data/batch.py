"""The batch: some rows of a dataset padded to one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vectorlm.errors import DatasetError

FILLER_ID = -1
"""The id of a row that stands for no example."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: B rows, T tokens."""

    input_ids: torch.Tensor
    """Tokens [B, T], int64."""
    attention_mask: torch.Tensor
    """1 where a token is part of its row, 0 where it is padding [B, T], int64."""
    labels: torch.Tensor
    """The tokens of `input_ids` that count in the loss, the ignore index elsewhere [B, T], int64; not shifted."""
    ids: torch.Tensor
    """The `id` of each row, `FILLER_ID` for a row without an example [B], int64."""


@dataclass(frozen=True)
class Collator:
    """Turn rows into a batch."""

    pad_token_id: int
    """What `input_ids` hold where there is no token."""
    ignore_index: int
    """What `labels` hold where nothing counts in the loss."""
    max_seq_len: int
    """Rows are cut off after this many tokens."""
    padding_side: str = "right"
    """``right`` or ``left``."""

    def __post_init__(self) -> None:
        if self.padding_side not in ("right", "left"):
            raise DatasetError(f"padding_side={self.padding_side!r} must be 'right' or 'left'. Use 'right'.")

    def collate(self, rows: Sequence[Mapping[str, Any]], num_rows: int) -> Batch:
        """Pad `rows` to the longest of them, then add filler rows up to `num_rows`.

        A filler row has one valid token, so that attention is defined, and no label that counts.

        Args:
            rows: At most `num_rows` mappings with `input_ids`, `labels`, `id` and possibly `attention_mask`.
            num_rows: B, the rows of the batch.

        Raises:
            DatasetError: A row is empty, or its columns differ in length.
        """
        filler = {"input_ids": [self.pad_token_id], "labels": [self.ignore_index], "id": FILLER_ID}
        full = [*rows, *[filler] * (num_rows - len(rows))]
        masks = [_checked_mask(row) for row in full]
        length = min(self.max_seq_len, max(map(len, masks)))
        return Batch(
            self._pad([row["input_ids"] for row in full], length, self.pad_token_id),
            self._pad(masks, length, 0),
            self._pad([row["labels"] for row in full], length, self.ignore_index),
            torch.tensor([row["id"] for row in full], dtype=torch.int64),
        )

    def _pad(self, values: Sequence[Sequence[int]], length: int, padding: int) -> torch.Tensor:
        """Cut and pad every list to `length` [B, length]."""
        padded = torch.full((len(values), length), padding, dtype=torch.int64)
        for row, value in zip(padded, values, strict=True):
            kept = torch.tensor(value[:length], dtype=torch.int64)
            place = slice(0, len(kept)) if self.padding_side == "right" else slice(length - len(kept), length)
            row[place] = kept
        return padded


def _checked_mask(row: Mapping[str, Any]) -> Sequence[int]:
    """Return the attention mask of a row whose columns belong together."""
    length = len(row["input_ids"])
    mask = row.get("attention_mask") or [1] * length
    if not length == len(row["labels"]) == len(mask) or length == 0:
        raise DatasetError(
            f"the row with id {row['id']} has {length} input_ids, {len(row['labels'])} labels and {len(mask)} "
            "attention_mask values: they must be equally many, at least one. Preprocess the dataset again."
        )
    return mask
