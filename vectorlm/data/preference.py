"""Preference data: the columns of pairs and of labelled completions, and their rows of two texts each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vectorlm.data.pack import Frame, TokenisedText, frame_texts, join
from vectorlm.data.summary import Summary, add_row
from vectorlm.errors import DatasetError

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = {"pairs": ("chosen", "rejected"), "labels": ("completion", "prompt", "label")}
"""The columns that rows must have, the one that tells messages from text first."""
READ_BESIDE: Mapping[str, tuple[str, ...]] = {"texts": (), "pairs": ("prompt", "margin"), "labels": ()}
VALUES = {"pairs": "margin", "labels": "label"}
"""What the value of a row is called in the source."""


def common_beginning(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many elements both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))


def value_of(name: str, row: Mapping[str, Any], examples: str) -> float:
    """Return the margin of a pair, 0 without one, or 1 for a good completion and 0 for a bad one.

    Raises:
        DatasetError: It is missing, or of another type.
    """
    if examples == "texts":
        return 0.0
    value = row.get(VALUES[examples])
    if examples == "pairs" and value is None:
        return 0.0
    is_label = isinstance(value, bool)
    if examples == "labels":
        is_right, what = is_label, "true or false"
    else:
        is_right = isinstance(value, int | float) and not is_label and math.isfinite(value)
        what = "a finite number"
    if value is None or not is_right:
        raise DatasetError(
            f"{name} holds {str(value)[:60]!r} in {VALUES[examples]!r}: it must be {what}. Correct it, or remove the row."
        )
    return float(value)


def rows_of_two(
    rows: Iterable[Mapping[str, Any]], tokens: Dataset, frame: Frame, summary: Summary
) -> Iterator[TokenisedText]:
    """Yield rows of two texts, each with its own BOS and EOS; a row with a text beyond `max_seq_len` is skipped.

    Of a pair these are chosen and rejected. Of a labelled completion they are its text, and its prompt with the
    completion of the next row that has another prompt, by which KTO estimates a KL divergence.
    """
    ignored, most = frame.ignore_index, frame.max_seq_len
    last_prompt = stranger = None
    for row in rows:
        text, num_first = text_of(row, ignored), row["num_first"]
        if num_first:
            texts = [text[:num_first], text[num_first:]]
        else:
            prompt, _ = _parts(text)
            if prompt != last_prompt:  # Else that of the row before is the next one here too.
                following = (tokens[(row["index"] + step) % len(tokens)] for step in range(1, len(tokens)))
                others = (_parts(text_of(each, ignored)) for each in following)
                stranger = next((said for other, said in others if said and other != prompt), None)
                last_prompt = prompt
            if stranger is None:
                add_row(summary.skipped, "no row of another prompt beside it", row["name"])
                continue
            texts = [text, (prompt + stranger)[: frame.capacity]]
        framed = list(frame_texts(texts, frame, summary, truncate=False))
        if max(map(len, framed)) > most:
            add_row(summary.skipped, f"a text longer than max_seq_len={most}", row["name"])
        elif any(set(each.labels[1:]) <= {ignored} for each in framed):
            add_row(summary.skipped, "a text without tokens of its own", row["name"])
        else:
            yield replace(join(framed), value=row["value"])


def text_of(row: Mapping[str, Any], ignore_index: int) -> TokenisedText:
    """Return the tokens of a row that the tokeniser made, with their labels."""
    pairs = zip(row["input_ids"], row["counted"], strict=True)
    return TokenisedText(row["input_ids"], [token if counts else ignore_index for token, counts in pairs])


def _parts(text: TokenisedText) -> tuple[TokenisedText, TokenisedText]:
    """Cut a text before the first token that counts."""
    counted = (place for place, label in enumerate(text.labels) if label == text.input_ids[place])
    start = next(counted, len(text))
    return text[:start], text[start:]
