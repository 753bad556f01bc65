"""The models beside the policy: reference, critic and reward models, loaded and sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vectorlm.algorithms.selection import Selection
from vectorlm.errors import ConfigError
from vectorlm.model.load import load_model
from vectorlm.ranks.topology import Topology
from vectorlm.rl.roles import disable_dropout
from vectorlm.rl.rows import map_rows
from vectorlm.rollout.batch import RolloutBatch
from vectorlm.rollout.rollout import Rollout
from vectorlm.weights.plan import reshard

Shard = Callable[[Any], nn.Module]
"""Spreads a model over the ranks, in place."""


def load_reference(path: str, shard: Shard, flash_attention: bool = False) -> nn.Module:
    """Load a frozen copy of the policy's starting point."""
    model = disable_dropout(load_model(path, flash_attention=flash_attention))
    model.requires_grad_(False)
    return shard(model)


def load_critic(path: str, shard: Shard) -> nn.Module:
    """Load a model with a value head of zeros, so that the first advantages are the rewards.

    Raises:
        ConfigError: transformers has no token classification for this architecture.
    """
    from transformers import AutoModelForTokenClassification

    try:
        model: Any = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    except ValueError as error:
        raise ConfigError(
            f"rl.critic.model={path!r} cannot be a critic: transformers has no token classification for it "
            f"({str(error)[:120]}). Choose an algorithm without a critic, or another model for it."
        ) from error
    head = model.get_submodule(_head_name(model))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return shard(disable_dropout(model.train()))


class RewardModel:
    """A sequence-classification model with one label, which reads prompt and completion as one text."""

    def __init__(
        self, path: str, shard: Shard, topology: Topology, *, max_tokens: int, max_length: int
    ) -> None:
        """Load the model and its tokenizer.

        Args:
            path: Folder that ``save_pretrained`` wrote.
            shard: Spreads the model over the ranks.
            topology: This rank's place.
            max_tokens: Tokens of one forward pass, padding included.
            max_length: Tokens after which a text is cut off, on the left.

        Raises:
            ConfigError: The folder is missing, or the model has more than one label.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if not (Path(path) / "config.json").is_file():
            raise ConfigError(f"reward model {path!r} has no config.json: name a folder of save_pretrained.")
        self._tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")
        model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
        if model.config.num_labels != 1:
            raise ConfigError(
                f"reward model {path!r} has {model.config.num_labels} labels: it must have one."
            )
        self._config = model.config
        model.requires_grad_(False)
        self._model = shard(disable_dropout(model))
        self._topology, self._max_tokens, self._max_length = topology, max_tokens, max_length

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Score rollouts; called on all ranks with the same ones."""
        if not rollouts:
            return []
        rows = [self._token_ids(rollout) for rollout in rollouts]
        lengths = tuple(map(len, rows))
        # The score is read at the last token that is not padding, so padding must be a token that ends no row.
        padding = self._tokenizer.pad_token_id
        if padding is None:
            used = {token for row in rows for token in row}
            padding = next(token for token in range(len(used) + 1) if token not in used)
        self._config.pad_token_id = padding
        input_ids = torch.full((len(rows), max(lengths)), padding)
        attention_mask = torch.zeros_like(input_ids)
        for index, row in enumerate(rows):
            input_ids[index, : len(row)] = torch.tensor(row)
            attention_mask[index, : len(row)] = 1
        nothing = torch.zeros(len(rows), 1)
        selection = Selection(nothing.long(), nothing.bool())
        batch = RolloutBatch(
            input_ids,
            attention_mask,
            attention_mask.bool(),
            attention_mask.float(),
            nothing,
            selection.valid,
            selection.columns,
            lengths,
        )
        scores = map_rows(batch, self._scores, self._topology, max_tokens=self._max_tokens)
        reshard(self._model)
        return scores[:, 0].tolist()

    def _scores(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, first: int) -> torch.Tensor:
        logits = self._model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits[:, :1].expand(input_ids.shape)

    def _token_ids(self, rollout: Rollout) -> list[int]:
        prompt: Any = rollout.question.prompt
        is_text = isinstance(prompt, str)
        if is_text:
            text = prompt + rollout.text
        elif len(prompt) and isinstance(prompt[0], int):
            text = str(self._tokenizer.decode(list(prompt))) + rollout.text
        else:
            chat: Any = [*prompt, {"role": "assistant", "content": rollout.text}]
            text = str(self._tokenizer.apply_chat_template(chat, tokenize=False))
        # Templates and tokens hold their special tokens already.
        limits = {"truncation": True, "max_length": self._max_length}
        return self._tokenizer(text, add_special_tokens=is_text, **limits)["input_ids"]


def _head_name(model: nn.Module) -> str:
    """Return the name of the output layer, which transformers calls `score` or `classifier`."""
    for name in ("score", "classifier"):
        if isinstance(getattr(model, name, None), nn.Module):
            return name
    raise ConfigError(f"the critic of type {type(model).__name__} has no output layer that is known here.")
