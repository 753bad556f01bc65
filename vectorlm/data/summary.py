"""Counts of a dataset's rows, tokens and skipped rows, for preprocessing, ``check`` and runs."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_PER_COUNT = 1000
PREFERENCE_COLUMNS = {"pairs": "pair_margin", "labels": "is_good"}
"""The column for the value of each row in datasets of pairs and of labelled completions."""
VALUE_COLUMNS = {**PREFERENCE_COLUMNS, "steps": "num_steps"}
"""The column by which the kind of a preprocessed dataset is recognised; texts have none."""
COUNTS = ("texts", "tokens", "loss_tokens", "long_rows", "cut_tokens", "cut_loss_tokens", "idle_rows")
"""The fields of `Summary` that are counted from the rows."""
_KEY = "vectorlm"
"""Key of the summary in a dataset's description."""

Rows = dict[str, tuple[int, str]]
"""The number of rows and the name of the first row, by reason."""


def steps_per_epoch(num_rows: int, rows_per_step: int) -> int:
    """Return the number of optimizer steps of an epoch; the last step may be short."""
    return -(-num_rows // rows_per_step)


@dataclass
class Summary:
    """Counts of the rows that were read, skipped, cut and written."""

    max_seq_len: int
    """Largest number of tokens of a row that training reads."""
    ignore_index: int
    rows_in: int = 0
    """Rows of the source, including skipped rows; 0 if the dataset was not made by preprocessing."""
    skipped: Rows = field(default_factory=dict)
    """Rows that were left out."""
    remarks: Rows = field(default_factory=dict)
    """Rows that were kept, by remark."""
    unread: list[str] = field(default_factory=list)
    """Columns and files of the source that were not read."""
    truncated: int = 0
    """Texts that were truncated at `max_seq_len`."""
    lost_tokens: int = 0
    """Tokens that truncated texts lost."""
    lost_loss_tokens: int = 0
    """Lost tokens that counted in the loss."""
    goes_on: int = 0
    """Number of times that a text was cut and continues in another row."""
    begins_rows_alone: bool = False
    """Whether BOS begins each row instead of each text, in rows of several texts."""
    rows_out: int = 0
    """Rows to train on."""
    texts: int = 0
    """Texts, or parts of texts, in these rows."""
    tokens: int = 0
    """Tokens of all rows."""
    loss_tokens: int = 0
    """Tokens within `max_seq_len` that count in the loss; the first token of a text has no prediction."""
    longest: int = 0
    """Tokens of the longest row."""
    long_rows: int = 0
    """Rows longer than `max_seq_len`."""
    cut_tokens: int = 0
    """Tokens that training cuts off long rows."""
    cut_loss_tokens: int = 0
    """Cut tokens that count in the loss."""
    has_pairs: bool = False
    """Whether each row holds two texts, of up to `max_seq_len` tokens each."""
    idle_rows: int = 0
    """Rows without a token within `max_seq_len` that counts in the loss."""
    tokenizer: str = ""
    """Folder or name of the tokenizer; empty if unknown."""
    vocabulary: str = ""
    """Digest of the tokenizer's vocabulary (`vocabulary_of`); empty if unknown."""

    @classmethod
    def read(cls, dataset: Dataset) -> Summary | None:
        """Return the summary that preprocessing saved with `dataset`; None if there is none."""
        return cls.parse(dataset.info.description)

    @classmethod
    def parse(cls, description: Any) -> Summary | None:
        """Return the summary in a dataset's description; None if there is none."""
        try:
            return cls(**json.loads(description)[_KEY])
        except (ValueError, KeyError, TypeError):
            return None

    @classmethod
    def of(cls, dataset: Dataset, max_seq_len: int, ignore_index: int) -> Summary:
        """Return the saved summary of `dataset`; count again if it was made for another length or ignore index."""
        found = cls.read(dataset) or cls(max_seq_len, ignore_index)
        is_other = (found.rows_out, found.ignore_index) != (len(dataset), ignore_index)
        cuts_other = max_seq_len != found.max_seq_len and found.longest > min(max_seq_len, found.max_seq_len)
        found.max_seq_len, found.ignore_index = max_seq_len, ignore_index
        if is_other or cuts_other:
            # 0.14 s for a million tokens.
            found.count(dataset)
        return found

    def keep_in(self, dataset: Dataset) -> None:
        """Write the summary into the dataset's description, which is saved with it."""
        dataset.info.description = json.dumps({_KEY: asdict(self)})

    def count(self, dataset: Dataset) -> None:
        """Count the rows of `dataset` as training reads them."""
        totals = Counter(dict.fromkeys(COUNTS, 0))
        self.rows_out, self.longest = len(dataset), 0
        self.has_pairs = not set(PREFERENCE_COLUMNS.values()).isdisjoint(dataset.column_names)
        is_labelled = PREFERENCE_COLUMNS["labels"] in dataset.column_names
        names = [name for name in ("labels", "attention_mask", "seq_lengths") if name in dataset.column_names]
        for table in dataset.select_columns(names).with_format("arrow").iter(ROWS_PER_COUNT):
            counts, longest = _count(
                table, self.max_seq_len, self.ignore_index, self.has_pairs, is_labelled=is_labelled
            )
            totals.update(counts)
            self.longest = max(self.longest, longest)
        for name, total in totals.items():
            setattr(self, name, total)

    @property
    def efficiency(self) -> float:
        """Mean share of `max_seq_len` that the tokens of a row fill in training, from 0 to 1."""
        num_full = self.texts if self.has_pairs else self.rows_out
        return (self.tokens - self.cut_tokens) / (num_full * self.max_seq_len)

    def why_skipped(self) -> str:
        """Return the number of skipped rows with the reasons, as text."""
        reasons = [f"{num:,} with {why} (first: {name})" for why, (num, name) in self.skipped.items()]
        return f"{sum(num for num, _ in self.skipped.values()):,}: {', '.join(reasons)}" if reasons else "0"

    def head(self) -> str:
        """Return the size of the dataset as a line of text."""
        texts = _count_of(self.texts, "text") + " or parts of texts" * bool(self.goes_on)
        return (
            f"{_count_of(self.rows_out, 'row')} of {texts}, {self.tokens:,} tokens, of which "
            f"{self.loss_tokens:,} count in the loss"
        )

    def notes(self) -> Iterator[str]:
        """Yield further facts, one sentence each."""
        sentences: dict[str, Any] = {
            f"skipped of {_count_of(self.rows_in, 'row')} {self.why_skipped()}": self.skipped,
            f"cut off at max_seq_len: {_count_of(self.truncated, 'text')}, which lost {self.lost_tokens:,} tokens, "
            f"{self.lost_loss_tokens:,} of them counted in the loss": self.truncated,
            f"cut in the middle of a text: {self.goes_on:,} times. The rest is in another row, which does not see the "
            "beginning (an EOS at such a cut does not count in the loss). Raise max_seq_len, or use packing_type: "
            "best_fit with truncate: True": self.goes_on,
            "BOS begins each row, not each text in it, because packing_type: full joins texts. Use best_fit for a "
            "model whose prompts begin with BOS": self.begins_rows_alone,
            f"rows longer than max_seq_len={self.max_seq_len}: {self.long_rows:,}. Training will cut "
            f"{self.cut_tokens:,} tokens off them, {self.cut_loss_tokens:,} of which count in the loss. Set truncate: "
            "True or a packing_type, or raise max_seq_len": self.long_rows,
            f"{self.idle_rows:,} of {_count_of(self.rows_out, 'row')} have no counted token within "
            f"{self.max_seq_len}": self.idle_rows,
        }
        yield from (sentence for sentence, applies in sentences.items() if applies)
        for remark, (num, name) in self.remarks.items():
            yield f"{_count_of(num, 'row')}: {remark} (first: {name})"
        if self.unread:
            yield f"not read: {', '.join(self.unread)}"

    def __str__(self) -> str:
        lines = {
            "rows in": f"{self.rows_in:,}",
            "skipped": self.why_skipped(),
            "rows out": f"{self.rows_out:,}",
            "tokens": f"{self.tokens:,}, of which {self.loss_tokens:,} count in the loss",
            "longest row": f"{self.longest:,} tokens",
            "efficiency": f"{100 * self.efficiency:.1f} % of rows out x max_seq_len={self.max_seq_len}",
        }
        table = [f"  {name:12}{value}" for name, value in lines.items()]
        notes = [f"note: {note}." for note in self.notes() if not note.startswith("skipped")]
        return "\n".join(table + notes)


def vocabulary_of(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's tokens and their ids."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.blake2b(repr(tokens).encode(), digest_size=8).hexdigest()


def add_row(rows: Rows, reason: str, name: str) -> None:
    """Count one more row for a reason."""
    num, first = rows.get(reason, (0, name))
    rows[reason] = (num + 1, first)


def _count(
    table: Any, max_seq_len: int, ignore_index: int, is_pairs: bool, *, is_labelled: bool
) -> tuple[dict[str, int], int]:
    """Return the `COUNTS` of the rows in an Arrow table, and the length of the longest row.

    The second text of a row that `is_labelled` is not trained on: KTO estimates a KL divergence from it.
    """
    import pyarrow.compute as pc

    def flat(name: str) -> np.ndarray:
        return pc.list_flatten(table[name]).to_numpy(zero_copy_only=False)

    labels = flat("labels")
    lengths = pc.fill_null(pc.list_value_length(table["labels"]), 0).to_numpy().astype(np.int64)
    if is_pairs:
        lengths = flat("seq_lengths").astype(np.int64)  # Each text is a row.
    row = np.repeat(np.arange(len(lengths)), lengths)
    kept = np.ones(len(labels), dtype=bool)
    # If a column has another length than the labels, training will raise an error with the row's name.
    if "attention_mask" in table.column_names and len(mask := flat("attention_mask")) == len(labels):
        kept = mask.astype(bool)
    lengths = np.bincount(row[kept], minlength=len(lengths))
    place = np.arange(kept.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    is_first = place == 0
    if "seq_lengths" in table.column_names and (texts := flat("seq_lengths")).sum() == len(labels):
        begins = np.zeros(len(labels) + 1, dtype=bool)
        begins[(texts.cumsum() - texts).astype(np.int64)] = True
        is_first |= begins[:-1][kept]
    is_trained = np.ones(len(lengths), dtype=bool)
    is_trained[1::2] = not is_labelled
    counted = (labels[kept] != ignore_index) & ~is_first & is_trained[row[kept]]
    cut = place >= max_seq_len
    learned = np.bincount(row[kept][counted & ~cut], minlength=len(lengths))
    numbers = {
        "texts": is_first.sum(),
        "tokens": kept.sum(),
        "loss_tokens": (counted & ~cut).sum(),
        "long_rows": (lengths > max_seq_len).sum(),
        "cut_tokens": cut.sum(),
        "cut_loss_tokens": (counted & cut).sum(),
        "idle_rows": ((learned == 0) & is_trained).sum(),
    }
    return {name: int(number) for name, number in numbers.items()}, int(lengths.max(initial=0))


def _count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else noun + 's'}"
