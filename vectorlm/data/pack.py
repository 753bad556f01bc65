"""Rows of tokens: texts cut to fit `max_seq_len`, with BOS and EOS around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from vectorlm.data.summary import Summary
from vectorlm.errors import ConfigError


@dataclass(frozen=True)
class TokenisedText:
    """Tokens with one label each."""

    input_ids: list[int]
    labels: list[int]
    """The same tokens where they count in the loss, the ignore index elsewhere; not shifted."""
    seq_lengths: Sequence[int] = ()
    """Tokens of each text in a packed row."""
    value: float = 0.0
    """The margin of a pair, or whether a completion is a good one."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def __add__(self, other: TokenisedText) -> TokenisedText:
        return TokenisedText(self.input_ids + other.input_ids, self.labels + other.labels)

    def __getitem__(self, where: slice) -> TokenisedText:
        return TokenisedText(self.input_ids[where], self.labels[where])

    @classmethod
    def ignored(cls, input_ids: Sequence[int], ignore_index: int) -> TokenisedText:
        """Return tokens that do not count in the loss."""
        return cls(list(input_ids), [ignore_index] * len(input_ids))

    @classmethod
    def counted(cls, input_ids: Sequence[int]) -> TokenisedText:
        """Return tokens that count in the loss."""
        return cls(list(input_ids), list(input_ids))


@dataclass(frozen=True)
class Frame:
    """How texts are cut into rows, and the tokens put around each row.

    BOS never counts in the loss. EOS counts where a text ends; one that only closes a chunk in the middle of a
    text does not, or the model would learn to stop there.
    """

    max_seq_len: int
    """Tokens of a packed or truncated row, at most."""
    bos_token_id: int | None = None
    """Put before each row; None for no token."""
    eos_token_id: int | None = None
    """Put after each text and each row; None for no token."""
    overlap: int = 0
    """Tokens of a chunk that the next one repeats; the repeated ones do not count in the loss."""
    ignore_index: int = -100
    """Label of a token that does not count in the loss."""

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < self.capacity:
            raise ConfigError(
                f"overlap={self.overlap} leaves no room for new tokens in chunks of max_seq_len={self.max_seq_len}: "
                f"it must lie between 0 and {self.capacity - 1}. Lower overlap or raise max_seq_len."
            )

    @property
    def capacity(self) -> int:
        """Tokens of text in a full row."""
        return self.max_seq_len - (self.bos_token_id is not None) - (self.eos_token_id is not None)

    @property
    def opening(self) -> TokenisedText:
        """The tokens before each row."""
        bos = [] if self.bos_token_id is None else [self.bos_token_id]
        return TokenisedText.ignored(bos, self.ignore_index)

    @property
    def closing(self) -> TokenisedText:
        """The tokens after a chunk that ends in the middle of a text."""
        return TokenisedText.ignored(self.ending.input_ids, self.ignore_index)

    @property
    def ending(self) -> TokenisedText:
        """The tokens after each text."""
        return TokenisedText.counted([] if self.eos_token_id is None else [self.eos_token_id])


def frame_texts(
    texts: Iterable[TokenisedText], frame: Frame, summary: Summary, *, truncate: bool
) -> Iterator[TokenisedText]:
    """Make each text one row. Texts without tokens are dropped.

    With `truncate` a row is cut off at `frame.max_seq_len`, and ends in an EOS that does not count in the loss; what it
    loses goes into `summary`.
    """
    for text in filter(len, texts):
        row = frame.opening + text + frame.ending
        if truncate and len(row) > frame.max_seq_len:
            length = frame.max_seq_len - len(frame.closing)
            lost = row.labels[length:]
            summary.truncated += 1
            summary.lost_tokens += len(lost)
            summary.lost_loss_tokens += len(lost) - lost.count(frame.ignore_index)
            row = row[:length] + frame.closing
        yield row


def pack_texts(
    texts: Iterable[TokenisedText], frame: Frame, summary: Summary, packing_type: Literal["full", "partial"]
) -> Iterator[TokenisedText]:
    """Cut texts into chunks of at most `frame.max_seq_len` tokens; `summary` counts the cuts within texts.

    ``partial`` cuts each text by itself, so that its last chunk may be short; ``full`` joins all texts, with EOS
    between them, so that only the very last chunk may be short. No token counts in the loss twice.
    """
    waiting = _NOTHING
    for text in filter(len, texts):
        waiting = waiting.followed_by(text, frame)
        rows, waiting = _cut(waiting, frame, summary, is_last=packing_type == "partial")
        yield from rows
    rows, _ = _cut(waiting, frame, summary, is_last=True)
    yield from rows


def best_fit(lengths: Sequence[int], max_seq_len: int) -> list[list[int]]:
    """Put texts of `lengths` into rows of `max_seq_len` tokens, the longest first, each where least room is left over.

    Returns:
        The places of each row's texts in `lengths`.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    # Bit n says that some row has room for n more tokens: the lowest bit from a length on is the best fit.
    rooms = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length = lengths[place]
        fitting = rooms >> length << length
        if fitting:
            room = (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            rooms ^= 0 if with_room[room] else 1 << room
        else:
            room, row = max_seq_len, len(rows)
            rows.append([])
        rows[row].append(place)
        if left := room - length:
            with_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return rows


def join(texts: Sequence[TokenisedText]) -> TokenisedText:
    """Make one row of several, which remain texts that do not see each other."""
    return TokenisedText(
        [token for text in texts for token in text.input_ids],
        [label for text in texts for label in text.labels],
        [len(text) for text in texts],
    )


@dataclass(frozen=True)
class _Stretch:
    """Tokens that wait to be cut into chunks."""

    text: TokenisedText
    ends: list[bool]
    """Whether a token is the last one of a text."""
    num_repeated: int
    """How many of the first tokens the previous chunk already held."""

    def followed_by(self, text: TokenisedText, frame: Frame) -> _Stretch:
        """Append one more text and its EOS."""
        text = text + frame.ending
        return _Stretch(self.text + text, [*self.ends, *[False] * (len(text) - 1), True], self.num_repeated)


_NOTHING = _Stretch(TokenisedText([], []), [], 0)


def _cut(
    stretch: _Stretch, frame: Frame, summary: Summary, *, is_last: bool
) -> tuple[list[TokenisedText], _Stretch]:
    """Cut off all complete chunks, or everything when nothing follows; return them and the rest."""
    rows = []
    start, fresh, length = 0, stretch.num_repeated, len(stretch.text)
    # A chunk waits for the token behind it, which may be the EOS that belongs to the chunk.
    while fresh < length and (is_last or start + frame.capacity < length):
        end = min(start + frame.capacity, length)
        if end < length and stretch.ends[end] and frame.ending:
            end += 1
        repeated = TokenisedText.ignored(stretch.text[start:fresh].input_ids, frame.ignore_index)
        summary.goes_on += not stretch.ends[end - 1]
        closing = TokenisedText([], []) if stretch.ends[end - 1] else frame.closing
        row = frame.opening + repeated + stretch.text[fresh:end] + closing
        inner = [place + 1 for place in range(start, end - 1) if stretch.ends[place]]
        bounds = [0, *(len(frame.opening) + place - start for place in inner), len(row)]
        rows.append(replace(row, seq_lengths=[after - before for before, after in pairwise(bounds)]))
        start, fresh = end - frame.overlap, end
    if is_last:
        return rows, _NOTHING
    return rows, _Stretch(stretch.text[start:], stretch.ends[start:], fresh - start)
