"""The tokenised text: its tokens, and which of them count in the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vectorlm.errors import DatasetError

_TEXTS_PER_CALL = 1000


@dataclass(frozen=True)
class TokenisedText:
    """Tokens with one label each."""

    input_ids: list[int]
    """The tokens."""
    labels: list[int]
    """The same tokens where they count in the loss, the ignore index elsewhere; not shifted."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def __add__(self, other: TokenisedText) -> TokenisedText:
        return TokenisedText(self.input_ids + other.input_ids, self.labels + other.labels)

    def __getitem__(self, part: slice) -> TokenisedText:
        return TokenisedText(self.input_ids[part], self.labels[part])

    @classmethod
    def ignored(cls, input_ids: Sequence[int], ignore_index: int) -> TokenisedText:
        """Return tokens of which none counts in the loss."""
        return cls(list(input_ids), [ignore_index] * len(input_ids))

    @classmethod
    def counted(cls, input_ids: Sequence[int]) -> TokenisedText:
        """Return tokens of which all count in the loss."""
        return cls(list(input_ids), list(input_ids))


def tokenise(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    seperator: str | None = None,
    pre_pend: str | None = None,
    ignore_index: int = -100,
) -> Iterator[TokenisedText]:
    """Tokenise texts, without special tokens, in their order.

    Text up to and including the first `seperator` is the prompt: tokenised by itself, as it will be when the
    model is asked, and left out of the loss.

    Args:
        texts: The texts.
        tokenizer: A transformers tokenizer.
        seperator: Where the prompt ends; None when everything counts in the loss.
        pre_pend: Text put before every text; the prompt may end in it.
        ignore_index: Label of a token that does not count in the loss.

    Raises:
        DatasetError: An entry is not text, or lacks the separator.
    """
    numbered = enumerate(texts)
    while some := list(islice(numbered, _TEXTS_PER_CALL)):
        parts = [_split(index, text, seperator, pre_pend or "") for index, text in some]
        prompts = _encode([prompt for prompt, _ in parts], tokenizer)
        completions = _encode([completion for _, completion in parts], tokenizer)
        for prompt, completion in zip(prompts, completions, strict=True):
            yield TokenisedText.ignored(prompt, ignore_index) + TokenisedText.counted(completion)


def _split(index: int, text: str, seperator: str | None, pre_pend: str) -> tuple[str, str]:
    """Return the part outside the loss and the part inside."""
    if not isinstance(text, str):
        raise DatasetError(
            f"row {index} holds {text!r}: it must be text. Remove the row, or choose another data_field."
        )
    whole = pre_pend + text
    if not seperator:
        return "", whole
    before, found, after = whole.partition(seperator)
    if not found:
        shown = whole if len(whole) <= 60 else f"{whole[:57]}..."
        raise DatasetError(
            f"row {index} ({shown!r}) does not contain the separator {seperator!r}: every text must. "
            "Correct `seperator`, or remove the row."
        )
    return before + found, after


def _encode(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
