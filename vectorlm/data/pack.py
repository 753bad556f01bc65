"""Rows of tokens: texts with BOS and EOS, cut and packed to fit `max_seq_len`, and rows of preference data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from vectorlm.data.settings import Overlong
from vectorlm.data.summary import Summary, add_row
from vectorlm.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = {
    "pairs": ("chosen", "rejected"),
    "labels": ("completion", "prompt", "label"),
    "steps": ("prompt", "completions", "labels"),
}
"""Required columns of preference data; the first shows whether rows hold messages or text."""
VALUES = {"pairs": "margin", "labels": "label", "steps": "labels"}
"""The column with the value of a row."""


@dataclass(frozen=True)
class TokenisedText:
    """The tokens of a text, and whether each of them counts in the loss."""

    input_ids: list[int]
    counted: list[bool]
    seq_lengths: Sequence[int] = ()
    """Number of tokens of each text in a packed row."""
    value: float = 0.0
    """The margin of a pair, 1 or 0 for a good or bad completion, or the number of steps."""
    step_labels: Sequence[bool] = ()
    """Whether each step is right; the last token of a step counts."""
    images: tuple[tuple[str, int], ...] = ()
    """The path or ``data:`` URL of each image, and the index of its first token."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def __add__(self, other: TokenisedText) -> TokenisedText:
        images = self.images + other.moved(len(self))
        return TokenisedText(self.input_ids + other.input_ids, self.counted + other.counted, images=images)

    def __getitem__(self, where: slice) -> TokenisedText:
        first, last, _ = where.indices(len(self))
        images = tuple((image, start) for image, start in self.moved(-first) if 0 <= start < last - first)
        return TokenisedText(self.input_ids[where], self.counted[where], images=images)

    def moved(self, by: int) -> tuple[tuple[str, int], ...]:
        """Return the images with `by` added to the indices of their first tokens."""
        return tuple((image, start + by) for image, start in self.images)

    def labels(self, ignore_index: int) -> list[int]:
        """Return the label of each token: the token itself, or 1 or 0 for a step; `ignore_index` outside the loss."""
        targets = iter(map(int, self.step_labels))
        pairs = zip(self.input_ids, self.counted, strict=True)
        if self.step_labels:
            return [next(targets) if counts else ignore_index for _, counts in pairs]
        return [token if counts else ignore_index for token, counts in pairs]


NOTHING = TokenisedText([], [])


@dataclass(frozen=True)
class Frame:
    """The rules for cutting texts into rows, and the tokens around each row.

    BOS never counts in the loss. EOS counts at the end of a text. At a cut in the middle of a text it does not count,
    because the model would learn to stop there.
    """

    max_seq_len: int
    """Largest number of tokens of a packed or truncated row."""
    bos_token_id: int | None = None
    """First token of each row; None for no token."""
    eos_token_id: int | None = None
    """Last token of each text and each row; None for no token."""
    overlap: int = 0
    """Tokens that a chunk repeats from the previous one; the repeated tokens do not count in the loss."""

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < self.capacity:
            raise ConfigError(
                f"overlap={self.overlap} must be between 0 and {self.capacity - 1}, to leave space for new tokens in "
                f"chunks of max_seq_len={self.max_seq_len}. Lower overlap or raise max_seq_len."
            )

    @property
    def capacity(self) -> int:
        """Tokens of text in a full row."""
        return self.max_seq_len - (self.bos_token_id is not None) - (self.eos_token_id is not None)

    @property
    def opening(self) -> TokenisedText:
        """The tokens at the beginning of each row."""
        return NOTHING if self.bos_token_id is None else TokenisedText([self.bos_token_id], [False])

    @property
    def closing(self) -> TokenisedText:
        """The tokens after a chunk that ends in the middle of a text."""
        return NOTHING if self.eos_token_id is None else TokenisedText([self.eos_token_id], [False])

    @property
    def ending(self) -> TokenisedText:
        """The tokens after each text."""
        return NOTHING if self.eos_token_id is None else TokenisedText([self.eos_token_id], [True])


def frame_texts(
    texts: Iterable[TokenisedText], frame: Frame, summary: Summary, *, truncate: bool
) -> Iterator[TokenisedText]:
    """Make each text one row, and drop texts without tokens.

    With `truncate` a row is cut at `frame.max_seq_len` and ends in an EOS outside the loss; `summary` counts the lost
    tokens.
    """
    for text in filter(len, texts):
        row = frame.opening + text + frame.ending
        if truncate and len(row) > frame.max_seq_len:
            length = frame.max_seq_len - len(frame.closing)
            lost = row.counted[length:]
            summary.truncated += 1
            summary.lost_tokens += len(lost)
            summary.lost_loss_tokens += sum(lost)
            row = row[:length] + frame.closing
        yield row


def pack_texts(
    texts: Iterable[TokenisedText], frame: Frame, summary: Summary, packing_type: Literal["full", "partial"]
) -> Iterator[TokenisedText]:
    """Cut texts into chunks of at most `frame.max_seq_len` tokens; `summary` counts the cuts within texts.

    ``partial`` cuts each text by itself; its last chunk may be short. ``full`` joins all texts, with EOS between them;
    only the very last chunk may be short. No token counts in the loss twice.
    """
    waiting = _Stretch(NOTHING, [], 0)
    for text in filter(len, texts):
        text = text + frame.ending
        ends = [*waiting.ends, *[False] * (len(text) - 1), True]
        waiting = _Stretch(waiting.text + text, ends, waiting.num_repeated)
        rows, waiting = _cut(waiting, frame, summary, is_last=packing_type == "partial")
        yield from rows
    rows, _ = _cut(waiting, frame, summary, is_last=True)
    yield from rows


@dataclass(frozen=True)
class _Stretch:
    """Tokens that wait to be cut into chunks."""

    text: TokenisedText
    ends: list[bool]
    """Whether a token is the last one of a text."""
    num_repeated: int
    """Number of tokens at the beginning that repeat the end of the previous chunk."""


def _cut(
    stretch: _Stretch, frame: Frame, summary: Summary, *, is_last: bool
) -> tuple[list[TokenisedText], _Stretch]:
    """Cut off all complete chunks, or everything if nothing follows; return the chunks and the rest."""
    rows = []
    start, fresh, length = 0, stretch.num_repeated, len(stretch.text)
    # A chunk waits for the next token, which may be the EOS that belongs to the chunk.
    while fresh < length and (is_last or start + frame.capacity < length):
        end = min(start + frame.capacity, length)
        if end < length and stretch.ends[end] and frame.ending:
            end += 1
        repeated = TokenisedText(stretch.text.input_ids[start:fresh], [False] * (fresh - start))
        summary.goes_on += not stretch.ends[end - 1]
        closing = NOTHING if stretch.ends[end - 1] else frame.closing
        row = frame.opening + repeated + stretch.text[fresh:end] + closing
        inner = [place + 1 for place in range(start, end - 1) if stretch.ends[place]]
        bounds = [0, *(len(frame.opening) + place - start for place in inner), len(row)]
        rows.append(replace(row, seq_lengths=[after - before for before, after in pairwise(bounds)]))
        start, fresh = end - frame.overlap, end
    if is_last:
        return rows, _Stretch(NOTHING, [], 0)
    return rows, _Stretch(stretch.text[start:], stretch.ends[start:], fresh - start)


def best_fit(lengths: Sequence[int], max_seq_len: int) -> list[list[int]]:
    """Pack texts of these `lengths` into rows, the longest first, each into the row with the least space left over.

    Returns:
        For each row the indices of its texts in `lengths`.
    """
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}
    # Bit n is set if a row has space for n more tokens: the lowest bit from a length on is the best fit.
    spaces = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        fitting = spaces >> length << length
        if fitting:
            space = (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            spaces ^= 0 if by_space[space] else 1 << space
        else:
            space, row = max_seq_len, len(rows)
            rows.append([])
        rows[row].append(index)
        if left := space - length:
            by_space.setdefault(left, []).append(row)
            spaces |= 1 << left
    return rows


def join(texts: Sequence[TokenisedText]) -> TokenisedText:
    """Join several texts to one row, in which they do not attend to each other."""
    starts = accumulate(map(len, texts), initial=0)
    return TokenisedText(
        [token for text in texts for token in text.input_ids],
        [counts for text in texts for counts in text.counted],
        [len(text) for text in texts],
        images=tuple(
            image for text, start in zip(texts, starts, strict=False) for image in text.moved(start)
        ),
    )


def value_of(name: str, row: Mapping[str, Any], examples: str) -> float:
    """Return a row's value: a pair's margin (default 0), 1 or 0 for a good or bad completion, or the number of steps.

    Raises:
        DatasetError: The value is missing, has a wrong type, or steps and labels differ in number.
    """
    value = row.get(VALUES.get(examples, ""))
    if examples == "texts" or (examples == "pairs" and value is None):
        return 0.0
    is_label = isinstance(value, bool)
    number: Any = value
    if examples == "steps":
        steps = row.get("completions")
        num = len(steps) if isinstance(steps, list) else 0
        has_labels = isinstance(value, list) and all(isinstance(label, bool) for label in value)
        is_right = has_labels and len(row["labels"]) == num > 0
        rule = f"a list of true or false for the {num} steps in 'completions'"
        number = num
    elif examples == "labels":
        is_right, rule = is_label, "true or false"
    else:
        is_right = isinstance(value, int | float) and not is_label and math.isfinite(value)
        rule = "a finite number"
    if not is_right:
        column = VALUES[examples]
        raise DatasetError(
            f"{name} holds {str(value)[:60]!r} in {column!r}: it must be {rule}. Correct it, or remove the row."
        )
    return float(number)


def rows_of_two(
    rows: Iterable[Mapping[str, Any]], tokens: Dataset, frame: Frame, summary: Summary, overlong: Overlong
) -> Iterator[TokenisedText]:
    """Yield rows of two texts, each with its own BOS and EOS; `overlong` decides about texts over `max_seq_len`.

    The texts of a pair are chosen and rejected. The first text of a labelled completion is its own. The second is its
    prompt with the completion of the next row that has another prompt; KTO estimates a KL divergence from it.
    """
    last_prompt = stranger = None
    for row in rows:
        text, num_first = text_of(row), row["num_first"]
        if num_first:
            texts = [text[:num_first], text[num_first:]]
        else:
            prompt, _ = _parts(text)
            if prompt != last_prompt:  # Otherwise the completion found for the previous row fits here too.
                following = (tokens[(row["index"] + step) % len(tokens)] for step in range(1, len(tokens)))
                others = (_parts(text_of(other)) for other in following)
                stranger = next((said for other, said in others if said and other != prompt), None)
                last_prompt = prompt
            if stranger is None:
                add_row(summary.skipped, "no row with another prompt, which KTO needs", row["name"])
                continue
            texts = [text, prompt + stranger]
        longest = max(
            map(len, frame_texts(texts if num_first else texts[:1], frame, summary, truncate=False))
        )
        excess = max(longest - frame.max_seq_len, 0)
        if excess and overlong == "error":
            raise DatasetError(
                f"{row['name']} holds a text of {longest} tokens: it must have at most "
                f"max_seq_len={frame.max_seq_len}. Raise max_seq_len, or set overlong_prompts to drop or truncate_left."
            )
        # A cut may go through an image.
        if (
            excess
            and overlong == "truncate_left"
            and not text.images
            and excess < min(len(_parts(side)[0]) for side in texts)
        ):
            summary.truncated += 2
            summary.lost_tokens += 2 * excess
            texts = [side[excess:] for side in texts]
        if not num_first:
            texts[1] = texts[1][: frame.capacity]
        framed = list(frame_texts(texts, frame, summary, truncate=False))
        if max(map(len, framed)) > frame.max_seq_len:
            add_row(summary.skipped, f"a text longer than max_seq_len={frame.max_seq_len}", row["name"])
        elif not all(any(side.counted[1:]) for side in framed):
            add_row(summary.skipped, "a text without tokens to train on", row["name"])
        else:
            yield replace(join(framed), value=row["value"])


def text_of(row: Mapping[str, Any]) -> TokenisedText:
    """Return the text of a tokenised row."""
    images = tuple(zip(row["images"], row["image_starts"], strict=True))
    return TokenisedText(row["input_ids"], row["counted"], images=images)


def _parts(text: TokenisedText) -> tuple[TokenisedText, TokenisedText]:
    """Cut a text before the first token that counts."""
    start = text.counted.index(True) if any(text.counted) else len(text)
    return text[:start], text[start:]


def rows_of_steps(
    rows: Iterable[Mapping[str, Any]], frame: Frame, summary: Summary
) -> Iterator[TokenisedText]:
    """Yield rows whose labels are 1 at the end of a right step and 0 at the end of a wrong one.

    Rows over `max_seq_len` are skipped. BOS begins a row; no EOS ends it, because no step ends there.
    """
    for row in rows:
        text = frame.opening + TokenisedText(row["input_ids"], row["counted"])
        if len(text) > frame.max_seq_len:
            add_row(summary.skipped, f"a text longer than max_seq_len={frame.max_seq_len}", row["name"])
        else:
            yield replace(text, value=row["value"], step_labels=row["step_labels"])
