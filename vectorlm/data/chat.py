"""The chat: a list of messages as the tokens of the tokenizer's chat template."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vectorlm.encoding import render_chat
from vectorlm.errors import ConfigError, DatasetError

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """Renders messages, and tells which tokens the assistant says."""

    tokenizer: Any

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            name = self.tokenizer.name_or_path
            raise ConfigError(
                f"the rows hold messages, and the tokenizer of {name!r} has no chat template. Save one as "
                f"{name}/chat_template.jinja, use an instruction-tuned model, or write the rows as text."
            )

    def render(self, name: str, messages: Sequence[Message], tools: Any, **how: Any) -> dict[str, list[int]]:
        """Return `input_ids`, and what else `how` asks the tokenizer for; `name` stands for the row in an error."""
        from jinja2.exceptions import TemplateError

        try:
            rendered: dict[str, list[int]] = render_chat(
                self.tokenizer, messages, tools=tools, return_dict=True, **how
            )
            return rendered
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise DatasetError(
                f"{name}: the chat template refuses the messages ({error}). Correct them, or remove the row."
            ) from error

    def assistant(self, name: str, messages: Sequence[Message], tools: Any) -> tuple[list[int], list[bool]]:
        """Return all tokens, and which of them the assistant says, with the end of its turns.

        The template's ``{% generation %}`` says it; without that, it is what each of the assistant's messages adds.
        """
        if self._marks_generation:
            found = self.render(name, messages, tools, return_assistant_tokens_mask=True)
            return found["input_ids"], [bool(value) for value in found["assistant_masks"]]
        whole = self.render(name, messages, tools)["input_ids"]
        counted = [False] * len(whole)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._start(name, messages, index, tools, whole)
                end = self._prefix(name, messages, index + 1, tools, whole)
                end = self._end_of_turn(whole, start, end)
                counted[start:end] = [True] * (end - start)
        return whole, counted

    def completion(
        self, name: str, prompt: Sequence[Message], completion: Sequence[Message], tools: Any
    ) -> tuple[list[int], list[bool]]:
        """Return all tokens, and which of them belong to the completion."""
        messages = [*prompt, *completion]
        whole = self.render(name, messages, tools)["input_ids"]
        start = (
            self._start(name, messages, len(prompt), tools, whole)
            if completion[0]["role"] == "assistant"
            else self._prefix(name, messages, len(prompt), tools, whole)
        )
        end = self._end_of_turn(whole, start, len(whole))
        return whole, [start <= place < end for place in range(len(whole))]

    @cached_property
    def _marks_generation(self) -> bool:
        templates = self.tokenizer.chat_template
        text = "".join(templates.values()) if isinstance(templates, dict) else templates
        text = re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL)
        # transformers finds the tokens of a stretch of text with fast tokenizers alone.
        return bool(re.search(r"\{%-?\s*generation\s*-?%\}", text)) and self.tokenizer.is_fast

    def _start(self, name: str, messages: Sequence[Message], index: int, tools: Any, whole: list[int]) -> int:
        """Return the place in `whole` from which message `index`, the assistant's, is the model's to write.

        That is behind the generation prompt. If there is none, or `whole` goes another way (a prompt may open a
        thought that the message does not have), it is where this message begins to differ from another in its place.
        """
        prompt = whole
        if index:  # Templates need a message.
            prompt = self.render(name, messages[:index], tools, add_generation_prompt=True)["input_ids"]
            if whole[: len(prompt)] == prompt:
                return len(prompt)
        self._prefix(name, messages, index + 1, tools, whole)
        message = messages[index]
        content = "y" if str(message.get("content", "")).lstrip().startswith("x") else "x"
        other = self.render(name, [*messages[:index], {**message, "content": content}], tools)["input_ids"]
        return len(os.path.commonprefix([whole, other, prompt]))

    def _prefix(self, name: str, messages: Sequence[Message], num: int, tools: Any, whole: list[int]) -> int:
        """Return how many tokens the first `num` messages are, after checking that `whole` begins with them."""
        tokens = self.render(name, messages[:num], tools)["input_ids"] if num else []
        if whole[: len(tokens)] != tokens:
            raise DatasetError(
                f"{name}: the chat template of {self.tokenizer.name_or_path!r} renders the first {num} messages "
                "differently when others follow, so that what the assistant says cannot be told apart. Mark it in the "
                "template with {% generation %} and {% endgeneration %}, or leave out assistant_only_loss and `prompt`."
            )
        return len(tokens)

    def _end_of_turn(self, tokens: list[int], start: int, end: int) -> int:
        """Return the place behind the last EOS, where there is one: what templates write behind it, nobody says."""
        ends = [place + 1 for place in range(start, end) if tokens[place] == self.tokenizer.eos_token_id]
        return ends[-1] if ends else end
