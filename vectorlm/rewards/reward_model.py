"""The reward model: a sequence-classification model that scores rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vectorlm.algorithms.batch import RolloutBatch
from vectorlm.encoding import is_messages, render_chat
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.rl.micro_batch import map_rows
from vectorlm.rl.models import LoadSharded, disable_dropout
from vectorlm.rl.rollout import Rollout
from vectorlm.train.load import load_pretrained
from vectorlm.train.packing import Rows
from vectorlm.weights.plan import reshard


class RewardModel:
    """A sequence-classification model with one label, which reads prompt and completion as one text."""

    def __init__(
        self,
        path: str,
        load_sharded: LoadSharded,
        topology: Topology,
        *,
        max_tokens: int,
        max_length: int,
        dtype: str = "float32",
    ) -> None:
        """Load and shard the model of a folder that ``save_pretrained`` wrote, and its tokenizer.

        One forward pass takes `max_tokens`, padding included; texts longer than `max_length` lose their beginning.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if not (Path(path) / "config.json").is_file():
            raise ConfigError(f"reward model {path!r} has no config.json: name a folder of save_pretrained.")
        self._tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")

        def load(is_empty: bool) -> torch.nn.Module:
            model = load_pretrained(AutoModelForSequenceClassification, path, dtype, is_empty)
            if model.config.num_labels != 1:
                raise ConfigError(
                    f"reward model {path!r} has {model.config.num_labels} labels: it must have one."
                )
            return disable_dropout(model).requires_grad_(False)

        self._model: Any = load_sharded(load)
        self._config: Any = self._model.config
        self._topology, self._max_tokens, self._max_length = topology, max_tokens, max_length

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Score rollouts; called on all ranks with the same ones."""
        if not rollouts:
            return []
        rows = [self._token_ids(rollout) for rollout in rollouts]
        # The score is read at the last token that is not padding. A tokenizer's padding token may also end rows, whose
        # scores would then be read one token early: only the model's own config decides what padding is.
        own_padding = padding = self._config.pad_token_id
        if padding is None:
            used = {token for row in rows for token in row}
            padding = next(token for token in range(len(used) + 1) if token not in used)
        self._config.pad_token_id = padding
        input_ids = torch.full((len(rows), max(map(len, rows))), padding)
        attention_mask = torch.zeros_like(input_ids)
        for index, row in enumerate(rows):
            input_ids[index, : len(row)] = torch.tensor(row)
            attention_mask[index, : len(row)] = 1
        # The model reads whole rows; no other field of the batch matters to it.
        mask, nothing = attention_mask.bool(), torch.zeros(len(rows), 1)
        unread = (attention_mask.float(), nothing, nothing.bool(), nothing.long(), attention_mask.float())
        batch = RolloutBatch(input_ids, attention_mask, mask, *unread)
        scores = map_rows(batch, self._scores, self._topology, max_tokens=self._max_tokens)
        self._config.pad_token_id = own_padding
        reshard(self._model)
        return scores[:, 0].tolist()

    def _scores(self, rows: Rows) -> torch.Tensor:
        input_ids, attention_mask = (
            each.to(self._topology.device) for each in (rows.input_ids, rows.attention_mask)
        )
        logits = self._model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits[:, :1].expand(input_ids.shape)

    def _token_ids(self, rollout: Rollout) -> list[int]:
        prompt: Any = rollout.prompt_record.prompt
        is_text = isinstance(prompt, str)
        if is_messages(prompt):
            chat = [*prompt, {"role": "assistant", "content": rollout.text}]
            text = str(render_chat(self._tokenizer, chat, tokenize=False))
        else:
            text = (prompt if is_text else str(self._tokenizer.decode(list(prompt)))) + rollout.text
        # Templates and tokens hold their special tokens already.
        limits = {"truncation": True, "max_length": self._max_length}
        return self._tokenizer(text, add_special_tokens=is_text, **limits)["input_ids"]
