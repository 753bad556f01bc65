"""The objective of a run on a dataset: what of a batch counts, and its loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from vectorlm.errors import DatasetError
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.packing import Rows
from vectorlm.types import Batch


class BatchLoader(Protocol):
    """Splits an epoch into optimizer steps, and each step into the micro-batches of this rank."""

    def __len__(self) -> int: ...  # Optimizer steps per epoch.

    def steps(self, epoch: int, start_step: int = 0) -> Iterator[list[Batch]]:
        """Yield this rank's micro-batches of every optimizer step of `epoch`, from `start_step` on."""
        ...


class Objective(Protocol):
    """A loss that is a sum over what counts in a batch, tokens or pairs; all ranks call each method alike."""

    @property
    def counts(self) -> str:
        """What counts, in the words of a message."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """What is measured beside the loss."""
        ...

    def prepare(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Take this rank's micro-batches of the next step, or of a held-out dataset, as `sum_loss` reads them."""
        ...

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Return how many tokens or pairs of a micro-batch count."""
        ...

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses, and of each of `names` a sum and what it is divided by, float64 [K, 2]."""
        ...


@dataclass(frozen=True)
class NextTokens:
    """The next-token loss of the target tokens."""

    language_model: LanguageModel
    ignore_index: int = -100
    """Label of tokens outside the loss."""
    counts = "token"
    names = ()

    def prepare(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Make each text a row of its own where that takes no padding, so that no text sees the one before it."""
        for batch in batches:
            is_cut = self.language_model.packs and batch.text_ids.any()
            yield apart(batch, self.ignore_index) if is_cut else batch

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the target tokens."""
        return is_target(batch, self.ignore_index).sum()

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the next-token losses of one micro-batch.

        Raises:
            DatasetError: A token, or a label that counts, is not in the model's vocabulary.
        """
        rows = known_rows(batch, self.language_model.model, self.ignore_index)
        return -self.language_model.logprobs(rows).sum(), torch.zeros(0, 2)


def is_target(batch: Batch, ignore_index: int) -> torch.Tensor:
    """Return bool [B, T], the tokens whose loss counts; the first of a row is not predicted."""
    found = batch.labels != ignore_index
    found[:, 0] = False
    return found


def known_rows(batch: Batch, model: torch.nn.Module, ignore_index: int) -> Rows:
    """Return a batch as the rows of a forward pass that asks for the target tokens.

    It looks on the CPU, where the batch still is: on CUDA an unknown token ends the process without its name.

    Raises:
        DatasetError: A token, or a label that counts, is not in the model's vocabulary.
    """
    num_tokens = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    targets = is_target(batch, ignore_index)
    labels = batch.labels.where(targets, 0)
    for name, values in (("token", batch.input_ids), ("label", labels)):
        is_unknown = (values < 0) | (values >= num_tokens)
        if is_unknown.any():
            row, column = is_unknown.nonzero()[0].tolist()
            raise DatasetError(
                f"row {batch.ids[row]} of the dataset holds the {name} {values[row, column]}, and the model has "
                f"{num_tokens} tokens; labels that do not count are dataset.ignore_index={ignore_index}. "
                "Preprocess the dataset with the model's own tokenizer, or set dataset.ignore_index."
            )
    return Rows(batch.input_ids, batch.attention_mask, targets, batch.ids.tolist(), batch.labels)


def apart(batch: Batch, ignore_index: int) -> Batch:
    """Make each text a row of its own, in the order of the batch."""
    lengths = [
        ids[mask.bool()].bincount().tolist()
        for ids, mask in zip(batch.text_ids, batch.attention_mask, strict=True)
    ]

    def cut(x: torch.Tensor, fill: int) -> torch.Tensor:
        texts = [text for row, each in zip(x, lengths, strict=True) for text in row[: sum(each)].split(each)]
        return pad_sequence(texts, batch_first=True, padding_value=fill)

    return replace(
        batch,
        input_ids=cut(batch.input_ids, 0),
        attention_mask=cut(batch.attention_mask, 0),
        labels=cut(batch.labels, ignore_index),
        ids=batch.ids.repeat_interleave(torch.tensor([len(each) for each in lengths])),
        text_ids=cut(torch.zeros_like(batch.text_ids), 0),
    )
