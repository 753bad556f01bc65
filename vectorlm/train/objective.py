"""The objective of a run on a dataset: what of a batch counts, and its loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from vectorlm.errors import DatasetError
from vectorlm.train.context import ContextGroup
from vectorlm.train.language_model import LanguageModel, inner_model, prepare_packing
from vectorlm.train.packing import Packing, Rows, pack
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


class Scorer:
    """Computes the score of each row, where transformers reads it: at the last token that is no padding token."""

    def __init__(
        self,
        model: nn.Module,
        *,
        packs: bool = True,
        device: str | torch.device = "cpu",
        context: ContextGroup | None = None,
    ) -> None:
        """Take a sharded model of `load_scorer`; called on all ranks. `packs` and `context` as of `LanguageModel`."""
        self.model, self._device, self._context = model, torch.device(device), context
        inner = inner_model(model)
        self._score, self._padding = inner.score, inner.config.get_text_config().pad_token_id
        self.why_padded = prepare_packing(
            model, self._of_padded, self._of_packed, packs=packs, context=context
        )
        """Why rows are padded; None where they are not."""

    def __call__(self, rows: Rows, is_read: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 [B], the scores of rows on the CPU; which tokens they ask for is not read.

        With `is_read`, bool [B, T], return float32 [M], the score at each of these tokens, row by row.
        """
        if self.why_padded is None:
            return self._of_packed(rows, is_read)[0]
        if is_read is None or not is_read.any():
            return self._of_padded(rows)[0][: None if is_read is None else 0]
        # transformers reads one score of a row: each token gets a row that ends with it.
        row, place = is_read.nonzero(as_tuple=True)
        is_before = torch.arange(is_read.shape[1]) <= place[:, None]
        ended = replace(
            rows, input_ids=rows.input_ids[row], attention_mask=rows.attention_mask[row] * is_before
        )
        return self._of_padded(ended)[0]

    def _of_padded(self, rows: Rows) -> tuple[torch.Tensor, torch.dtype]:
        inputs = {
            "input_ids": rows.input_ids.where(rows.attention_mask.bool(), self._padding).to(self._device),
            "attention_mask": rows.attention_mask.to(self._device),
        }
        logits = self.model(**inputs, use_cache=False).logits
        return logits[:, 0].float(), logits.dtype

    def _of_packed(self, rows: Rows, is_read: torch.Tensor | None = None) -> tuple[torch.Tensor, Packing]:
        if is_read is None:
            places = torch.arange(rows.input_ids.shape[1])
            is_text = rows.attention_mask.bool() & (rows.input_ids != self._padding)
            is_read = F.one_hot(places.where(is_text, 0).amax(dim=1), len(places)).bool()
        # A pass returns states of the tokens before those that are asked for, and the last has none behind it.
        is_asked = F.pad(is_read, (1, 0))
        input_ids, mask = F.pad(rows.input_ids, (0, 1)), F.pad(rows.attention_mask, (0, 1))
        packing = pack(Rows(input_ids, mask, is_asked, rows.groups), self._context)
        model: Any = self.model
        # Behind the pass: FSDP2 warns of views that it returns.
        scores = model.packed_pass(packing, self._device, self._score)[:, 0].float()
        return packing.gather(scores), packing
