"""Preference data: the columns of pairs, of labelled completions and of steps, and the rows that they become."""

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

COLUMNS = {
    "pairs": ("chosen", "rejected"),
    "labels": ("completion", "prompt", "label"),
    "steps": ("prompt", "completions", "labels"),
}
"""The columns that rows must have, the one that tells messages from text first."""
READ_BESIDE: Mapping[str, tuple[str, ...]] = {"pairs": ("prompt", "margin")}
VALUES = {"pairs": "margin", "labels": "label", "steps": "labels"}
"""What the value of a row is called in the source."""


def common_beginning(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many elements both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))


def value_of(name: str, row: Mapping[str, Any], examples: str) -> float:
    """Return the margin of a pair, 0 without one; 1 for a good completion, 0 for a bad one; of steps their number.

    Raises:
        DatasetError: It is missing, or of another type, or steps have another number of labels.
    """
    if examples == "texts":
        return 0.0
    value = row.get(VALUES[examples])
    if examples == "pairs" and value is None:
        return 0.0
    is_label = isinstance(value, bool)
    if examples == "steps":
        steps = row.get("completions")
        num = len(steps) if isinstance(steps, list) else 0
        has_labels = isinstance(value, list) and all(isinstance(each, bool) for each in value)
        is_right = has_labels and len(row["labels"]) == num > 0
        what = (
            f"a list of true or false, one for each of the steps in 'completions', of which there are {num}"
        )
        value = num if is_right else value
    elif examples == "labels":
        is_right, what = is_label, "true or false"
    else:
        is_right = isinstance(value, int | float) and not is_label and math.isfinite(value)
        what = "a finite number"
    if value is None or not is_right:
        raise DatasetError(
            f"{name} holds {str(value)[:60]!r} in {VALUES[examples]!r}: it must be {what}. Correct it, or remove the "
            "row."
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


def rows_of_steps(
    rows: Iterable[Mapping[str, Any]], frame: Frame, summary: Summary
) -> Iterator[TokenisedText]:
    """Yield rows whose labels are 1 at the end of a right step and 0 at the end of a wrong one.

    A row beyond `max_seq_len` is skipped. BOS stands before it, and no EOS behind it, where no step ends.
    """
    for row in rows:
        labels = iter(row["step_labels"])
        marks = [int(next(labels)) if ends else frame.ignore_index for ends in row["counted"]]
        text = frame.opening + TokenisedText(row["input_ids"], marks)
        if len(text) > frame.max_seq_len:
            add_row(summary.skipped, f"a text longer than max_seq_len={frame.max_seq_len}", row["name"])
        else:
            yield replace(text, value=row["value"])


def text_of(row: Mapping[str, Any], ignore_index: int) -> TokenisedText:
    """Return the tokens of a row that the tokeniser made, with their labels."""
    pairs = zip(row["input_ids"], row["counted"], strict=True)
    return TokenisedText(row["input_ids"], [token if counts else ignore_index for token, counts in pairs])


def _parts(text: TokenisedText) -> tuple[TokenisedText, TokenisedText]:
    """Cut a text before the first token that counts."""
    counted = (place for place, label in enumerate(text.labels) if label == text.input_ids[place])
    start = next(counted, len(text))
    return text[:start], text[start:]
