"""A sharded sequence classifier with one label as a function from texts to their scores: a reward model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vectorlm.train.context import ContextGroup
from vectorlm.train.language_model import inner_model, prepare_packing
from vectorlm.train.packing import Packing, Rows, pack


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
