"""The row: tokenised text cut and framed to fit the longest sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from vectorlm.data.tokenise import TokenisedText
from vectorlm.errors import ConfigError


@dataclass(frozen=True)
class Frame:
    """How rows are cut out of texts, and what is put around them.

    BOS never counts in the loss. EOS counts where a text ends; one that only closes a chunk in the middle of a
    text does not, or the model would learn to stop there.
    """

    max_seq_len: int
    """Tokens of a packed or truncated row, at most."""
    bos_token_id: int | None = None
    """Put before each row; None for nothing."""
    eos_token_id: int | None = None
    """Put after each text and each row; None for nothing."""
    overlap: int = 0
    """Tokens of a chunk that the next one repeats; there they do not count in the loss again."""
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
        """What stands before each row."""
        bos = [] if self.bos_token_id is None else [self.bos_token_id]
        return TokenisedText.ignored(bos, self.ignore_index)

    @property
    def closing(self) -> TokenisedText:
        """What stands after a chunk that ends in the middle of a text."""
        return TokenisedText.ignored(self.ending.input_ids, self.ignore_index)

    @property
    def ending(self) -> TokenisedText:
        """What stands after each text."""
        return TokenisedText.counted([] if self.eos_token_id is None else [self.eos_token_id])


def frame_texts(texts: Iterable[TokenisedText], frame: Frame, *, truncate: bool) -> Iterator[TokenisedText]:
    """Make each text one row; with `truncate` cut it off at `frame.max_seq_len`. Texts without tokens are dropped."""
    for text in filter(len, texts):
        row = frame.opening + text + frame.ending
        yield row[: frame.max_seq_len] if truncate else row


def pack_texts(
    texts: Iterable[TokenisedText], frame: Frame, packing_type: Literal["full", "partial"]
) -> Iterator[TokenisedText]:
    """Cut texts into chunks of at most `frame.max_seq_len` tokens.

    ``partial`` cuts each text by itself, so that its last chunk may be short; ``full`` joins all texts, with
    their EOS in between, so that only the very last chunk may be short. No token counts in the loss twice.
    """
    waiting = _NOTHING
    for text in filter(len, texts):
        rows, waiting = _cut(waiting.followed_by(text, frame), frame, is_last=packing_type == "partial")
        yield from rows
    rows, _ = _cut(waiting, frame, is_last=True)
    yield from rows


@dataclass(frozen=True)
class _Stretch:
    """Tokens that wait to be cut into chunks."""

    text: TokenisedText
    """The tokens."""
    ends: list[bool]
    """Whether a token is the EOS of a text."""
    num_repeated: int
    """How many of the first tokens the chunk before held already."""

    def followed_by(self, text: TokenisedText, frame: Frame) -> _Stretch:
        """Return this stretch with one more text, and its EOS, behind it."""
        ends = [False] * len(text) + [True] * len(frame.ending)
        return _Stretch(self.text + text + frame.ending, self.ends + ends, self.num_repeated)


_NOTHING = _Stretch(TokenisedText([], []), [], 0)


def _cut(stretch: _Stretch, frame: Frame, *, is_last: bool) -> tuple[list[TokenisedText], _Stretch]:
    """Cut off all chunks that are complete, or simply all when nothing follows; return them and what remains."""
    rows = []
    start, fresh, length = 0, stretch.num_repeated, len(stretch.text)
    # Without knowing the token behind a chunk we could not tell whether it is the EOS that belongs to it.
    while fresh < length and (is_last or start + frame.capacity < length):
        end = min(start + frame.capacity, length)
        if end < length and stretch.ends[end]:
            end += 1
        repeated = TokenisedText.ignored(stretch.text[start:fresh].input_ids, frame.ignore_index)
        closing = TokenisedText([], []) if stretch.ends[end - 1] else frame.closing
        rows.append(frame.opening + repeated + stretch.text[fresh:end] + closing)
        start, fresh = end - frame.overlap, end
    if is_last:
        return rows, _NOTHING
    return rows, _Stretch(stretch.text[start:], stretch.ends[start:], fresh - start)
