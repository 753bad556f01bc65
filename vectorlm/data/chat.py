"""The chat: a list of messages as the tokens of the tokenizer's chat template."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

from vectorlm.data.encoding import encode_apart, end_tokens, marked_spans, plain_message, render_chat
from vectorlm.errors import ConfigError, DatasetError

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """Renders messages, and tells which tokens count in the loss."""

    tokenizer: Any

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            name = self.tokenizer.name_or_path
            raise ConfigError(
                f"the rows hold messages, and the tokenizer of {name!r} has no chat template. Save one as "
                f"{name}/chat_template.jinja, use an instruction-tuned model, or write the rows as text."
            )

    def render(self, name: str, messages: Sequence[Message], tools: Any, **how: Any) -> str:
        """Return messages as the template writes them; `name` stands for the row in an error."""
        from jinja2.exceptions import TemplateError

        try:
            return str(render_chat(self.tokenizer, messages, tools=tools, tokenize=False, **how))
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise DatasetError(
                f"{name}: the chat template refuses the messages ({error}). Correct them, or remove the row."
            ) from error

    def renders_same(self, name: str, text: str, messages: Sequence[Message], tools: Any) -> bool:
        """Return whether the template writes `text` for `messages`."""
        try:
            return self.render(name, messages, tools) == text
        except DatasetError:
            return False

    def changes(self, name: str, messages: Sequence[Message], tools: Any, text: str) -> Iterator[str]:
        """Say how `text`, which the template wrote, departs from `messages` and from what engines ask."""
        said = [each["content"] for each in messages if each["role"] != "tool" and "content" in each]
        if any(content.strip() not in text for content in said):
            yield "the chat template changes what a message says, or cuts its reasoning out"
        if len(messages) > 1 and messages[-1]["role"] == "assistant":
            with suppress(DatasetError):
                prompt = self.render(name, messages[:-1], tools, add_generation_prompt=True)
                if not text.startswith(prompt):
                    yield "the last answer does not go on from the generation prompt that engines put before it"

    def tokenise(
        self,
        name: str,
        messages: Sequence[Message],
        tools: Any,
        *,
        num_prompt: int | None = None,
        only_assistant: bool = False,
        left_out: Collection[int] = (),
    ) -> tuple[list[int], list[bool]]:
        """Return all tokens, and which of them count.

        Everything counts, or what follows the first `num_prompt` messages, or what the assistant says up to the end of
        its turns: the template's ``{% generation %}`` marks it, and without that it is what each of the assistant's
        messages adds. The messages with the indices `left_out` never count.
        """
        text = self.render(name, messages, tools)
        start = 0
        if num_prompt is not None:
            is_reply = messages[num_prompt]["role"] == "assistant"
            start = (self._start if is_reply else self._end)(name, messages, num_prompt, tools, text)
        counts = bytearray(start) + b"\1" * (len(text) - start)
        if only_assistant:
            said = bytearray(len(text))
            for first, last in self._said(name, messages, tools, text):
                said[first:last] = b"\1" * (last - first)
            counts = bytearray(one & other for one, other in zip(counts, said, strict=True))
        for index in left_out:
            first, last = (self._end(name, messages, num, tools, text) for num in (index, index + 1))
            counts[first:last] = bytes(last - first)
        spans = [found.span() for found in re.finditer(rb"[^\0]+", counts)]
        is_marked = only_assistant and self._marks_generation(tools)
        return self._tokens(text, spans, cut=not is_marked and (only_assistant or num_prompt is not None))

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return end_tokens(self.tokenizer)

    def _marks_generation(self, tools: Any) -> bool:
        # Rows with tools may get another of several templates.
        text = re.sub(r"\{#.*?#\}", "", self.tokenizer.get_chat_template(None, tools), flags=re.DOTALL)
        return bool(re.search(r"\{%-?\s*generation\s*-?%\}", text))

    def _said(self, name: str, messages: Sequence[Message], tools: Any, text: str) -> list[tuple[int, int]]:
        if self._marks_generation(tools):
            return marked_spans(self.tokenizer, messages, tools)
        return [
            (
                self._start(name, messages, index, tools, text),
                self._end(name, messages, index + 1, tools, text),
            )
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]

    def _start(self, name: str, messages: Sequence[Message], index: int, tools: Any, text: str) -> int:
        """Return the place in `text` from which message `index`, the assistant's, is the model's to write.

        That is behind the generation prompt. If there is none, or `text` goes another way (a prompt may open a
        thought that the message does not have), it is where this message begins to differ from another in its place.
        """
        prompt = text
        if index:  # Templates need a message.
            prompt = self.render(name, messages[:index], tools, add_generation_prompt=True)
            if text.startswith(prompt):
                return len(prompt)
        self._end(name, messages, index + 1, tools, text)
        message = messages[index]
        content = "y" if str(message.get("content", "")).lstrip().startswith("x") else "x"
        other = self.render(name, [*messages[:index], {**message, "content": content}], tools)
        return len(os.path.commonprefix([text, other, prompt]))  # noqa: RUF071  It is a prefix of text.

    def _end(self, name: str, messages: Sequence[Message], num: int, tools: Any, text: str) -> int:
        """Return where the first `num` messages end in `text`, after checking that it begins with them."""
        begin = self.render(name, messages[:num], tools) if num else ""
        if not text.startswith(begin):
            raise DatasetError(
                f"{name}: the chat template of {self.tokenizer.name_or_path!r} renders the first {num} messages "
                "differently when others follow, so that what the assistant says cannot be told apart. Mark it in the "
                "template with {% generation %} and {% endgeneration %}, or leave out assistant_only_loss and `prompt`."
            )
        return len(begin)

    def _tokens(
        self, text: str, spans: Sequence[tuple[int, int]], *, cut: bool
    ) -> tuple[list[int], list[bool]]:
        """Tokenise the text; of the characters in `spans` the tokens count.

        No token holds characters of both sides: the model continues the tokens of a prompt. With `cut`, what the
        template writes behind the last end in a span does not count, since nobody says it.
        """
        places = [0, *(place for span in spans for place in span), len(text)]
        (pieces,) = encode_apart(self.tokenizer, [[text[first:last] for first, last in pairwise(places)]])
        tokens = list(chain(*pieces))
        borders = [0, *accumulate(map(len, pieces))]
        counted = [False] * len(tokens)
        for first, last in zip(borders[1:-1:2], borders[2::2], strict=True):
            ends = [place + 1 for place in range(first, last) if tokens[place] in self.ends]
            # Another end than EOS may be the next role's marker, behind which more is said.
            is_last = bool(ends) and (
                tokens[ends[-1] - 1] == self.tokenizer.eos_token_id
                or not self.tokenizer.decode(tokens[ends[-1] : last]).strip()
            )
            if is_last and cut:
                last = ends[-1]
            elif not ends and last > first and last < len(tokens) and tokens[last] in self.ends:
                # The end of the turn that the template writes behind it, or the next role's marker.
                last += 1
            counted[first:last] = [True] * (last - first)
        return tokens, counted


def messages_of(name: str, value: Any) -> list[Message]:
    """Return messages with their content as one text, and without the keys that are null."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise DatasetError(
            f"{name} holds {str(value)[:60]!r}: it must be a list of messages. Remove the row, or choose another "
            "data_field."
        )
    messages: list[Message] = []
    for number, given in enumerate(value):
        message = {key: each for key, each in given.items() if each is not None}
        if not isinstance(message.get("role"), str) or not ("content" in message or "tool_calls" in message):
            raise DatasetError(
                f"{name}: message {number} is {str(given)[:60]!r}, and must have a `role` and a `content`. "
                "Correct it, or remove the row."
            )
        try:
            plain = plain_message(message, is_data=True)
        except ValueError as error:
            raise DatasetError(
                f"{name}: message {number}: {error}. Correct it, or remove the row."
            ) from error
        # The arguments stay as they are, for templates that take only text.
        messages.append({key: plain[key] if key == "content" else each for key, each in message.items()})
    return messages


def weight_of(name: str, of: Mapping[str, Any]) -> int:
    """Return the `weight` of a row of messages, or of a message: 0 leaves it out of the loss, as OpenAI's does."""
    weight = 1 if of.get("weight") is None else of["weight"]
    if weight not in (0, 1):
        raise DatasetError(
            f"{name} has the weight {weight!r}: it must be 0 or 1, for the loss of rows and messages counts or does "
            "not. Correct it, or rename the key."
        )
    return int(weight)
