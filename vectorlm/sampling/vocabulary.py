"""Text to token ids and back, as vLLM does it, by the tokenizer saved beside a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vectorlm.errors import EngineError
from vectorlm.types import Prompt

NUM_CONTEXT_TOKENS = 8
"""Tokens of the prompt that are decoded with a completion: whether its text begins with a space depends on them."""


class Vocabulary:
    """The tokens of one model."""

    def __init__(self, tokenizer: Any, size: int, end_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.size = size
        """Tokens that the model has embeddings for."""
        self.end_token_ids = end_token_ids
        """Tokens that end a completion."""

    @classmethod
    def of(cls, model_path: str | Path, model: Any) -> Vocabulary:
        """Read the tokenizer of a folder, if it has one, and the end tokens of tokenizer and model together."""
        from transformers import AutoTokenizer

        has_tokenizer = (
            any(Path(model_path).glob("tokenizer*")) or (Path(model_path) / "vocab.json").is_file()
        )
        tokenizer = AutoTokenizer.from_pretrained(model_path) if has_tokenizer else None
        ends = model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            ends.add(tokenizer.eos_token_id)
        return cls(tokenizer, model.get_input_embeddings().num_embeddings, frozenset(ends))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Turn text, chat messages or token ids into token ids.

        Raises:
            EngineError: The prompt is empty, has tokens that the model lacks, or is text and there is no tokenizer.
        """
        ids = self._encode(prompt)
        if not ids:
            raise EngineError(f"the prompt {prompt!r} has no tokens: there is nothing to continue.")
        if outside := [token for token in ids if not 0 <= token < self.size]:
            raise EngineError(f"a prompt has token {outside[0]}: it must be from 0 to {self.size - 1}.")
        return ids

    def _encode(self, prompt: Any) -> tuple[int, ...]:
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if not isinstance(prompt, str) and not is_chat:
            return tuple(int(token) for token in prompt)
        if self._tokenizer is None:
            raise EngineError("the model's folder has no tokenizer: prompts must be token ids.")
        if is_chat:
            text = self._tokenizer.apply_chat_template(
                list(prompt), tokenize=False, add_generation_prompt=True
            )
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        return tuple(self._tokenizer.encode(prompt))

    def text(
        self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], skip_special_tokens: bool
    ) -> str:
        """Return the text that `token_ids` add to the prompt's."""
        if self._tokenizer is None:
            return ""
        context = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        before = self._tokenizer.decode(context, skip_special_tokens=skip_special_tokens)
        after = self._tokenizer.decode([*context, *token_ids], skip_special_tokens=skip_special_tokens)
        # A character whose last bytes have not been sampled is no text yet.
        return after[len(before) :].rstrip("\N{REPLACEMENT CHARACTER}")
