"""Load a dataset, and split it into the micro-batches of each rank and optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from vectorlm.data.images import PlacedPicture, picture_of
from vectorlm.data.source import load_saved
from vectorlm.data.summary import PREFERENCE_COLUMNS, Summary, steps_per_epoch, vocabulary_of
from vectorlm.errors import DatasetError
from vectorlm.ranks.topology import Topology
from vectorlm.types import Batch

if TYPE_CHECKING:
    from datasets import Dataset

IMAGE_COLUMNS = ("images", "image_starts")
_PREFERENCES = tuple(PREFERENCE_COLUMNS.values())
FILLER_ID = -1
"""The id of a filler row; other ids are indices in the dataset."""


@dataclass(frozen=True)
class Collator:
    """A collator that pads rows to a batch."""

    pad_token_id: int
    """Value of `input_ids` in the padding."""
    ignore_index: int
    """Label of tokens outside the loss."""
    max_seq_len: int
    """Largest number of tokens of a row; the rest is cut off."""

    def collate(self, rows: Sequence[Mapping[str, Any]], num_rows: int) -> Batch:
        """Pad `rows` on the right to the longest of them, then add filler rows up to `num_rows`.

        Tokens outside a row's own `attention_mask` are dropped. A filler row has one valid token, because attention
        needs one, and no label that counts.
        """
        filler = {"input_ids": [self.pad_token_id], "labels": [self.ignore_index], "id": FILLER_ID}
        full = [*rows, *[filler] * (num_rows - len(rows))]
        values = [next((row[name] for name in _PREFERENCES if name in row), 0.0) for row in full]
        input_ids, labels, text_ids = map(list, zip(*map(self._tokens, full), strict=True))
        pad = partial(pad_sequence, batch_first=True)
        return Batch(
            pad(input_ids, padding_value=self.pad_token_id),
            pad([torch.ones_like(row) for row in input_ids]),
            pad(labels, padding_value=self.ignore_index),
            torch.tensor([row["id"] for row in full], dtype=torch.int64),
            pad(text_ids),
            torch.tensor(values, dtype=torch.float32),
            images=list(map(self._images, full, input_ids)) if any("images" in row for row in rows) else None,
        )

    def _images(self, row: Mapping[str, Any], input_ids: torch.Tensor) -> list[PlacedPicture]:
        """Return the pictures of a row; raise DatasetError if a row with pictures was cut."""
        pairs = zip(row.get("images") or (), row.get("image_starts") or (), strict=True)
        placed = [PlacedPicture(picture_of(image), start) for image, start in pairs]
        if placed and len(input_ids) < len(row["input_ids"]):
            raise DatasetError(
                f"row {row['id']} of the dataset has images and {len(row['input_ids'])} tokens, but only "
                f"{len(input_ids)} fit. Raise max_seq_len."
            )
        return placed

    def _tokens(self, row: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tokens, labels and text ids of a row, int64 [T] each, cut to `max_seq_len`."""
        input_ids, labels = row["input_ids"] or [], row["labels"] or []
        length = len(input_ids)
        mask = row.get("attention_mask") or [1] * length
        try:
            lengths = row.get("seq_lengths") or [length]
            text_ids = [text for text, length in enumerate(lengths) for _ in range(length)]
            columns = [torch.tensor(column, dtype=torch.int64) for column in (input_ids, labels, text_ids)]
            is_kept = torch.tensor(mask, dtype=torch.bool)
        # A list contains a null, a text or a number over int64.
        except (TypeError, ValueError, RuntimeError) as error:
            raise DatasetError(
                f"row {row['id']} of the dataset must hold lists of integers ({error}). Preprocess the dataset again."
            ) from error
        if not length == len(labels) == len(mask) == len(text_ids) or not any(mask):
            raise DatasetError(
                f"row {row['id']} of the dataset has {length} input_ids, {len(labels)} labels, {len(mask)} "
                f"attention_mask values and seq_lengths of {len(text_ids)} tokens, which must be equal and at least 1. "
                "Preprocess the dataset again."
            )
        if not row.keys().isdisjoint(_PREFERENCES):
            if len(lengths) != 2:
                raise DatasetError(
                    f"row {row['id']} of the dataset has {len(lengths)} seq_lengths, but preference data needs two. "
                    "Preprocess the dataset again."
                )
            # Each text of a pair may have max_seq_len tokens.
            places = [place for length in lengths for place in range(length)]
            is_kept &= torch.tensor(places) < self.max_seq_len
            return [column[is_kept] for column in columns]
        return [column[is_kept][: self.max_seq_len] for column in columns]


@dataclass(eq=False)
class StepLoader:
    """A loader that splits each epoch into optimizer steps, and each step into this rank's micro-batches.

    The rows of a step depend only on the seed, the epoch and the global batch size
    ``num_data_shares * micro_batch_size * num_micro_batches``, not on how that product is split. Each epoch has every
    row exactly once. Filler rows, which do not count in the loss, complete a short last step, because all ranks must
    make the same number of forward passes. There is no state to save: the loader can start at any step of any epoch.

    Raises:
        ValueError: The dataset lacks a column.
        DatasetError: The dataset is empty, or has no label that counts.
    """

    dataset: Dataset
    """Rows with `input_ids` and `labels`, optionally `attention_mask` and `seq_lengths` (of a row's texts)."""
    collator: Collator
    topology: Topology
    _: KW_ONLY
    micro_batch_size: int
    """Rows of one forward pass on one rank."""
    num_micro_batches: int = 1
    """Forward passes of one rank per optimizer step."""
    seed: int
    """Seed of the order of the rows, together with the epoch; at least 0."""
    shuffle: bool
    """Whether to shuffle the rows in every epoch; False keeps the order of the dataset."""
    references: torch.Tensor | None = None
    """float32 [rows of the dataset, 2], the `references` of batches; None if a loss needs none."""

    def __post_init__(self) -> None:
        optional = ("attention_mask", "seq_lengths", *IMAGE_COLUMNS, *_PREFERENCES)
        columns = ["input_ids", "labels", *(name for name in optional if name in self.dataset.column_names)]
        self.dataset = self.dataset.select_columns(columns).with_format(None)
        # Without a label that counts, weight decay alone would move the weights. The first token is not predicted.
        length, ignored = self.collator.max_seq_len, self.collator.ignore_index
        labels = (label for row in self.dataset for label in (row["labels"] or [])[1:length])
        if all(label == ignored for label in labels):
            raise DatasetError(
                f"no row of the dataset has a label that counts within its first {length} tokens: all are {ignored}. "
                "Raise max_seq_len, or check how the dataset was made."
            )

    def __len__(self) -> int:
        """Return the number of optimizer steps per epoch."""
        return steps_per_epoch(self.num_examples, self.global_batch_size)

    @property
    def num_examples(self) -> int:
        """Rows of the dataset."""
        return len(self.dataset)

    @property
    def has_texts_in_rows(self) -> bool:
        """Whether a row holds several texts."""
        lengths = self.dataset["seq_lengths"] if "seq_lengths" in self.dataset.column_names else ()
        return any(len(row or ()) > 1 for row in lengths)

    @property
    def global_batch_size(self) -> int:
        """Rows of one optimizer step over all ranks and micro-batches."""
        return self.topology.num_data_shares * self.micro_batch_size * self.num_micro_batches

    def steps(self, epoch: int, start_step: int = 0) -> Iterator[list[Batch]]:
        """Yield this rank's micro-batches of every optimizer step of `epoch`, from `start_step` on.

        Raises:
            DatasetError: A row is empty, or its columns differ in length.
        """
        order = self._order(epoch)
        size = self.micro_batch_size
        for step in range(start_step, len(self)):
            start = step * self.global_batch_size
            # Every num_data_shares-th row, because ranks then share a short last step about equally.
            rows = order[start : start + self.global_batch_size]
            mine = rows[self.topology.data_share :: self.topology.num_data_shares]
            starts = range(0, size * self.num_micro_batches, size)
            yield [self._batch(mine[first : first + size]) for first in starts]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_examples))
        # A hash of the pair: with seed + epoch, seed 0 in epoch 1 would have the order of seed 1 in epoch 0.
        mixed = np.random.SeedSequence((self.seed, epoch)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(mixed[0]))
        return torch.randperm(self.num_examples, generator=generator).tolist()

    def _batch(self, indices: Sequence[int]) -> Batch:
        columns: dict[str, Any] = self.dataset[list(indices)] if indices else {}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        rows = [{"id": index, **row} for index, row in zip(indices, rows, strict=True)]
        batch = self.collator.collate(rows, self.micro_batch_size)
        if self.references is None:
            return batch
        return replace(batch, references=self.references[batch.ids.clamp(min=0)])


def load_dataset(path: str | Path, tokenizer: Any = None) -> Dataset:
    """Load a preprocessed dataset (or a folder of ``save_to_disk``), and compare its vocabulary with `tokenizer`.

    Raises:
        DatasetError: The folder does not exist or does not hold a single dataset, or the dataset was made with another
            vocabulary.
    """
    from datasets import Dataset

    dataset = load_saved(Path(path), f"'{path}'")
    if not isinstance(dataset, Dataset):
        splits = ", ".join(f"'{Path(path) / name}'" for name in dataset)
        raise DatasetError(f"'{path}' must hold a single dataset, but holds several. Use one of {splits}.")
    made = Summary.read(dataset)
    if tokenizer is not None and made is not None and made.vocabulary not in ("", vocabulary_of(tokenizer)):
        raise DatasetError(
            f"'{path}' was made with the tokenizer of {made.tokenizer!r}, whose vocabulary differs from the vocabulary "
            f"of {tokenizer.name_or_path!r}. Preprocess it again with this model."
        )
    return dataset
