"""The reward model: a sequence-classification model that scores rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from vectorlm.algorithms.batch import RolloutBatch
from vectorlm.data.encoding import encode, is_messages, render_chat, tools_of
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.rl.micro_batch import map_rows
from vectorlm.rl.models import LoadSharded
from vectorlm.rl.rewards.function import shown
from vectorlm.rl.rollout import Rollout
from vectorlm.sampling.weights.model_tensors import reshard
from vectorlm.train.load import STEP_SEPARATOR, load_pretrained
from vectorlm.train.objective import Scorer
from vectorlm.train.packing import Rows

COMBINED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "min": torch.min,
    "mean": torch.mean,
    "last": lambda found: found[-1],
}
"""Functions that reduce the probabilities of steps to one reward."""


class RewardModel:
    """A sequence-classification model with one label, which reads prompt and completion as one text.

    If its tokenizer has a `STEP_SEPARATOR`, it scores the end of each step: the log-odds that the step is right.
    """

    def __init__(
        self,
        path: str,
        load_sharded: LoadSharded,
        topology: Topology,
        policy_tokenizer: Any,
        *,
        max_tokens: int,
        max_length: int,
        dtype: str = "float32",
        step_reward: Literal["min", "mean", "last"] = "min",
        source_tools: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Load and shard a model from a folder of ``save_pretrained``, and load its tokenizer.

        `policy_tokenizer` decodes prompts of token ids.

        One forward pass takes at most `max_tokens`, padding included. Texts longer than `max_length` tokens lose their
        beginning. `step_reward` chooses the reward from the probabilities of steps. `source_tools` are the tools of
        each source's environment; the chat template renders them after the tools of the prompt's row.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if not (Path(path) / "config.json").is_file():
            raise ConfigError(
                f"reward model {path!r} has no config.json. Name a folder from save_pretrained."
            )
        self._tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")

        def load(is_empty: bool) -> torch.nn.Module:
            model = load_pretrained(AutoModelForSequenceClassification, path, dtype, is_empty)
            if model.config.num_labels != 1:
                raise ConfigError(
                    f"reward model {path!r} has {model.config.num_labels} labels: it must have one."
                )
            return model.eval().requires_grad_(False)

        self._model: Any = load_sharded(load)
        self._config: Any = self._model.config
        self._policy_tokenizer = policy_tokenizer
        self._topology, self._max_tokens, self._max_length = topology, max_tokens, max_length
        self._combine = COMBINED[step_reward]
        self._source_tools = source_tools or {}
        self._separator = self._tokenizer.init_kwargs.get(STEP_SEPARATOR)
        self._of_steps = None if self._separator is None else Scorer(self._model, device=topology.device)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Score rollouts; call it on all ranks with the same rollouts."""
        if not rollouts:
            return []
        laid = [self._steps(rollout) for rollout in rollouts] if self._of_steps else []
        rows = [row for row, _ in laid] or [self._token_ids(rollout) for rollout in rollouts]
        # The score is read at the last token that is not padding. A tokenizer's padding token may also end rows, whose
        # scores would then be read one token early. Therefore only the model's own config defines the padding token.
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
        # The model reads whole rows and no other field of the batch.
        mask, nothing = attention_mask.bool(), torch.zeros(len(rows), 1)
        for index, (_, ends) in enumerate(laid):
            mask[index, : len(ends)] = torch.tensor(ends)
        unread = (attention_mask.float(), nothing, nothing.bool(), nothing.long(), attention_mask.float())
        batch = RolloutBatch(input_ids, attention_mask, mask, *unread)
        scores = map_rows(batch, self._scores, self._topology, max_tokens=self._max_tokens)
        self._config.pad_token_id = own_padding
        reshard(self._model)
        if self._of_steps is None:
            return scores[:, 0].tolist()
        found = (row[is_end].sigmoid() for row, is_end in zip(scores, mask, strict=True))
        return [self._combine(scores).item() for scores in found]

    def _scores(self, rows: Rows) -> torch.Tensor:
        if self._of_steps is not None:
            at_ends = self._of_steps(rows, rows.is_asked)
            is_asked = rows.is_asked.to(at_ends.device)
            return at_ends.new_zeros(is_asked.shape).masked_scatter(is_asked, at_ends)
        input_ids, attention_mask = (
            field.to(self._topology.device) for field in (rows.input_ids, rows.attention_mask)
        )
        logits = self._model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits[:, :1].expand(input_ids.shape)

    def _steps(self, rollout: Rollout) -> tuple[list[int], list[bool]]:
        """Return the tokens of a prompt and its steps, as in training, and whether each token ends a step.

        With an environment, the prompt is everything before the last turn.
        """
        prompt, whole = rollout.prompt_record.prompt, rollout.text
        if rollout.messages is not None:
            *prompt, last = rollout.messages
            whole = last["content"]
        *_, answer = rollout.turn_texts or (whole,)
        steps = [step for step in answer.split(self._separator) if step.strip()] or [answer]
        if isinstance(prompt, str) or is_messages(prompt):
            ids = encode({"prompt": prompt, "tools": self._tools(rollout)}, lambda: self._tokenizer)
        else:
            ids = self._tokenizer(self._decode(prompt), add_special_tokens=False)["input_ids"]
        if before := whole.removesuffix(answer):
            ids = ids + self._tokenizer(before, add_special_tokens=False)["input_ids"]
        ends = [False] * len(ids)
        (separator, *texts) = self._tokenizer([self._separator, *steps], add_special_tokens=False)[
            "input_ids"
        ]
        for text in texts:
            ids = ids + text + separator
            ends += [False] * (len(text) + len(separator) - 1) + [True]
        return ids[-self._max_length :], ends[-self._max_length :]

    def _token_ids(self, rollout: Rollout) -> list[int]:
        prompt: Any = rollout.prompt_record.prompt
        is_text = isinstance(prompt, str)
        if (chat := shown(rollout).messages) is not None:
            text = str(render_chat(self._tokenizer, chat, tools=self._tools(rollout), tokenize=False))
        else:
            text = (prompt if is_text else self._decode(prompt)) + rollout.text
        # Templates and token ids already include their special tokens.
        limits = {"truncation": True, "max_length": self._max_length}
        return self._tokenizer(text, add_special_tokens=is_text, **limits)["input_ids"]

    def _tools(self, rollout: Rollout) -> list[Any] | None:
        record = rollout.prompt_record
        return [*(tools_of(record.columns) or ()), *self._source_tools.get(record.source, ())] or None

    def _decode(self, prompt: Any) -> str:
        return str(self._policy_tokenizer.decode(list(prompt)))
