"""Tokenise messages with the chat template, and mark the tokens that count in the loss."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

from vectorlm.data.encoding import (
    decoded,
    encode_apart,
    end_tokens,
    marked_spans,
    plain_message,
    render_chat,
    text_of_message,
)
from vectorlm.errors import ConfigError, DatasetError

Message = dict[str, Any]
PRINTED_CHAT = re.compile(
    r"(?=.*['\"](?:content|value|tool_calls)['\"]\s*:)\s*\[\s*\{\s*(['\"])(?:role|content|from)\1\s*:.*\}\s*\]\s*",
    re.DOTALL,
)
"""Matches a list of messages printed by Python or numpy."""


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template, which renders and tokenises messages, and marks tokens that count in the loss."""

    tokenizer: Any

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            name = self.tokenizer.name_or_path
            raise ConfigError(
                f"rows of messages need a chat template, which the tokenizer of {name!r} does not have. Save one as "
                f"{name}/chat_template.jinja, use an instruction-tuned model, or write the rows as text."
            )

    def render(self, name: str, messages: Sequence[Message], tools: Any, **how: Any) -> str:
        """Render messages as text with the template; `name` is the row's name in errors."""
        from jinja2.exceptions import TemplateError

        try:
            return str(render_chat(self.tokenizer, messages, tools=tools, tokenize=False, **how))
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise DatasetError(
                f"{name}: the chat template refuses the messages ({error}). Correct them, or remove the row."
            ) from error

    def cleaned(self, name: str, messages: Sequence[Message], tools: Any) -> tuple[list[Message], list[str]]:
        """Return messages without the keys that the template ignores, and remarks on how it renders them."""
        remarks = []
        messages = [{key: value for key, value in one.items() if key != "weight"} for one in messages]
        text = self.render(name, messages, tools)

        def renders_same(others: Sequence[Message], tools: Any) -> bool:
            try:
                return self.render(name, others, tools) == text
            except DatasetError:
                return False

        if tools and renders_same(messages, None):
            remarks.append("the chat template does not render the column 'tools'")
        for key in sorted({key for message in messages for key in message} - {"role", "content"}):
            others = [{other: value for other, value in one.items() if other != key} for one in messages]
            if renders_same(others, tools):
                messages = others
                remarks.append(f"the chat template does not render {key!r} of messages")
        contents = [text_of_message(one) for one in messages if one["role"] != "tool" and "content" in one]
        if any(content.strip() not in text for content in contents):
            remarks.append("the chat template changes the text of a message, or removes its reasoning")
        if len(messages) > 1 and messages[-1]["role"] == "assistant":
            with suppress(DatasetError):
                prompt = self.render(name, messages[:-1], tools, add_generation_prompt=True)
                if not text.startswith(prompt):
                    remarks.append("the last answer does not continue the generation prompt of engines")
        return messages, remarks

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
        """Return all tokens, and whether each of them counts in the loss.

        By default all tokens count. With `num_prompt`, only tokens after the first `num_prompt` messages count; with
        `only_assistant`, only the assistant's tokens, up to the end of each turn. The template's ``{% generation %}``
        marks the assistant's text; without it, this is the text that each assistant message adds. Messages at the
        indices `left_out` never count.
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
        # A tokenizer may have a separate template for tools.
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
        """Return the position in `text` at which the model begins to write message `index`, of the assistant.

        This is after the generation prompt. If `text` does not contain that prompt, it is the first difference from
        the text with another message at this index. The prompt may open a thought that the message lacks.
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
        """Return the end of the first `num` messages in `text`; raise DatasetError if `text` begins differently."""
        begin = self.render(name, messages[:num], tools) if num else ""
        if not text.startswith(begin):
            raise DatasetError(
                f"{name}: the chat template of {self.tokenizer.name_or_path!r} renders the first {num} messages "
                "differently if others follow, which hides where the assistant's text begins. Mark it in the template "
                "with {% generation %} and {% endgeneration %}, or leave out assistant_only_loss and `prompt`."
            )
        return len(begin)

    def _tokens(
        self, text: str, spans: Sequence[tuple[int, int]], *, cut: bool
    ) -> tuple[list[int], list[bool]]:
        """Tokenise the text; the tokens of the characters in `spans` count.

        No token crosses the border of a span, because the model continues the tokens of a prompt. With `cut`, text
        after the last end token in a span does not count: the template writes it, not the model.
        """
        places = [0, *(place for span in spans for place in span), len(text)]
        (pieces,) = encode_apart(self.tokenizer, [[text[first:last] for first, last in pairwise(places)]])
        tokens = list(chain(*pieces))
        borders = [0, *accumulate(map(len, pieces))]
        counted = [False] * len(tokens)
        for first, last in zip(borders[1:-1:2], borders[2::2], strict=True):
            ends = [place + 1 for place in range(first, last) if tokens[place] in self.ends]
            # An end token other than EOS may be the next role's marker, with more text after it.
            is_last = bool(ends) and (
                tokens[ends[-1] - 1] == self.tokenizer.eos_token_id
                or not self.tokenizer.decode(tokens[ends[-1] : last]).strip()
            )
            if is_last and cut:
                last = ends[-1]
            elif not ends and last > first and last < len(tokens) and tokens[last] in self.ends:
                # The end token after the turn, or the next role's marker.
                last += 1
            counted[first:last] = [True] * (last - first)
        return tokens, counted


def chat_in(value: Any) -> Any:
    """Return the messages in a JSON text or in an object of lists; return any other value unchanged.

    Raises:
        ValueError: A text looks like a printed list of messages, but is not JSON.
    """
    found = value
    if isinstance(value, str):
        if not value.lstrip().startswith(("[", "{", '"')):
            return value
        try:
            found = decoded(value)
        except ValueError as error:
            if PRINTED_CHAT.fullmatch(value):
                raise ValueError(f"it looks like a list of messages, but is not JSON: {error}") from None
            return value
    if isinstance(found, Mapping):
        lists = list(found.values())
        if not isinstance(found.get("role"), list) or len({*map(len, lists)}) != 1:
            lists = [[item] for item in lists]
        # Tables may hold the roles in one list and the contents in another.
        found = [dict(zip(found, items, strict=True)) for items in zip(*lists, strict=True)]
    is_list = isinstance(found, list) and all(isinstance(item, Mapping) for item in found)
    return found if is_list and _are_messages(found) else value


def _are_messages(found: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all objects name a speaker and some have contents; structured answers have such keys too."""
    says = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
    is_named = all(not {"role", "from"}.isdisjoint(item) for item in found)
    return is_named and any(keys <= item.keys() for item in found for keys in says)


def common_beginning(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))


def messages_of(name: str, value: Any) -> list[Message]:
    """Return messages without null keys; their content is one text, or a list of parts if they have images."""
    if not isinstance(value, list) or not all(isinstance(given, dict) for given in value):
        raise DatasetError(
            f"{name} holds {str(value)[:60]!r}: it must be a list of messages. Remove the row, or choose another "
            "data_field."
        )
    messages: list[Message] = []
    for number, given in enumerate(value):
        message = {key: part for key, part in given.items() if part is not None}
        if not isinstance(message.get("role"), str) or not ("content" in message or "tool_calls" in message):
            raise DatasetError(
                f"{name}: message {number} is {str(given)[:60]!r}, but needs a `role` and a `content`. Correct it, or "
                "remove the row."
            )
        try:
            plain = plain_message(message, is_data=True)
        except ValueError as error:
            raise DatasetError(
                f"{name}: message {number}: {error}. Correct it, or remove the row."
            ) from error
        # Arguments of calls stay as they are, because some templates need text.
        messages.append(message | ({"content": plain["content"]} if "content" in message else {}))
    return messages


def messages_behind(name: str, prompt: Sequence[Message], messages: list[Message]) -> list[Message]:
    """Return `messages`, without the prompt's messages if they begin with them."""
    if messages[: len(prompt)] == prompt:
        return messages[len(prompt) :]
    first = messages[0] if messages else {}
    restarts = {"system", "developer"} | ({"user"} & {prompt[-1]["role"]})
    if first and (first["role"] in restarts or first == prompt[0]):
        raise DatasetError(
            f"{name}: the messages must begin with the messages in 'prompt' or continue them, but the first is "
            f"{str(first)[:60]!r}. Remove the prompt, or the messages that repeat it."
        )
    return messages


def weight_of(name: str, source: Mapping[str, Any]) -> int:
    """Return the `weight` of a row or a message; as with OpenAI, 0 leaves it out of the loss."""
    weight = 1 if source.get("weight") is None else source["weight"]
    if weight not in (0, 1):
        raise DatasetError(
            f"{name} has the weight {weight!r}, which must be 0 or 1. Correct it, or rename the key."
        )
    return int(weight)
