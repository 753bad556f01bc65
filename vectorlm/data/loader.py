"""The loader: which rows of a dataset each rank sees at each optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vectorlm.data.batch import Batch, Collator
from vectorlm.errors import DatasetError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Batch", "StepLoader", "load_dataset"]

_REQUIRED_COLUMNS = ("input_ids", "labels")
_OPTIONAL_COLUMNS = ("attention_mask", "id")


class StepLoader:
    """Split each epoch into optimizer steps, and each step into this rank's micro-batches.

    The rows of a step depend on the seed, the epoch and the global batch size
    ``world_size * micro_batch_size * num_micro_batches`` alone, not on how that product is split. Each row is
    seen exactly once per epoch. A last step with too few rows is completed with filler rows that count in no
    loss, so that all ranks do the same number of forward passes. There is no state to save: any step of any
    epoch can be started from.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        num_micro_batches: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        pad_token_id: int,
        ignore_index: int,
        max_seq_len: int,
        padding_side: str = "right",
    ) -> None:
        """Check the columns and fix the sizes.

        Args:
            dataset: Rows with `input_ids` and `labels`, optionally `attention_mask` and `id` (else the row's index).
            micro_batch_size: Rows of one forward pass on one rank.
            num_micro_batches: Forward passes of one rank per optimizer step.
            rank: This rank, from 0.
            world_size: Number of ranks.
            seed: What the order of the rows is drawn from, at least 0.
            shuffle: Whether the order is drawn for every epoch, or is that of the dataset.
            pad_token_id: What padded `input_ids` hold.
            ignore_index: What padded `labels` hold.
            max_seq_len: Rows are cut off after this many tokens.
            padding_side: ``right`` or ``left``.

        Raises:
            DatasetError: The dataset is empty or lacks a column.
        """
        _check_columns(dataset)
        columns = [name for name in (*_REQUIRED_COLUMNS, *_OPTIONAL_COLUMNS) if name in dataset.column_names]
        self._dataset = dataset.select_columns(columns).with_format(None)
        self._collator = Collator(pad_token_id, ignore_index, max_seq_len, padding_side)
        self._micro_batch_size = micro_batch_size
        self._num_micro_batches = num_micro_batches
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._shuffle = shuffle

    def __len__(self) -> int:
        """Return the number of optimizer steps per epoch."""
        return -(-self.num_examples // self.global_batch_size)

    @property
    def num_examples(self) -> int:
        """Rows of the dataset."""
        return len(self._dataset)

    @property
    def global_batch_size(self) -> int:
        """Rows of one optimizer step over all ranks and micro-batches."""
        return self._world_size * self._micro_batch_size * self._num_micro_batches

    def steps(self, epoch: int, start_step: int = 0) -> Iterator[list[Batch]]:
        """Yield this rank's micro-batches of every optimizer step of an epoch.

        Args:
            epoch: The epoch, from 0.
            start_step: The first step to yield, from 0.

        Raises:
            DatasetError: A row is empty, or its columns differ in length.
        """
        order = self._order(epoch)
        for step in range(start_step, len(self)):
            start = step * self.global_batch_size
            # Every world_size-th row: a short last step leaves each rank about equally many examples.
            mine = order[start : start + self.global_batch_size][self._rank :: self._world_size]
            yield [
                self._batch(mine[first : first + self._micro_batch_size])
                for first in range(
                    0, self._num_micro_batches * self._micro_batch_size, self._micro_batch_size
                )
            ]

    def _order(self, epoch: int) -> list[int]:
        """Return the rows' indices in the order of this epoch."""
        if not self._shuffle:
            return list(range(self.num_examples))
        # A hash of the pair: seed + epoch would give seed 0, epoch 1 the order of seed 1, epoch 0.
        mixed = np.random.SeedSequence((self._seed, epoch)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(mixed[0]))
        return torch.randperm(self.num_examples, generator=generator).tolist()

    def _batch(self, indices: Sequence[int]) -> Batch:
        columns: dict[str, Any] = self._dataset[list(indices)] if indices else {}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        rows = [{"id": index} | row for index, row in zip(indices, rows, strict=True)]
        return self._collator.collate(rows, self._micro_batch_size)


def load_dataset(path: str | Path) -> Dataset:
    """Load a dataset that preprocessing (or ``datasets.Dataset.save_to_disk``) wrote.

    Raises:
        DatasetError: There is no such folder, or it holds no single dataset.
    """
    from datasets import Dataset, load_from_disk

    if not Path(path).is_dir():
        raise DatasetError(
            f"dataset folder '{path}' does not exist: it must be one that save_to_disk wrote. "
            "Correct the path, or make the dataset first."
        )
    try:
        dataset = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DatasetError(
            f"'{path}' holds no dataset that save_to_disk wrote ({error}). Make the dataset again."
        ) from error
    if not isinstance(dataset, Dataset):
        splits = ", ".join(f"'{Path(path) / name}'" for name in dataset)
        raise DatasetError(f"'{path}' holds several datasets, but one is needed. Use one of {splits}.")
    return dataset


def _check_columns(dataset: Dataset) -> None:
    missing = [name for name in _REQUIRED_COLUMNS if name not in dataset.column_names]
    if missing:
        raise DatasetError(
            f"the dataset has the columns {', '.join(dataset.column_names) or 'none'}, but lacks "
            f"{' and '.join(missing)}: both input_ids and labels are needed. Preprocess it first."
        )
    if len(dataset) == 0:
        raise DatasetError("the dataset has 0 rows: at least one is needed. Check how it was made.")
