"""The summary: what became of the rows of a dataset, in the words of preprocessing, ``check`` and every run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_PER_COUNT = 1000
PREFERENCE_COLUMNS = {"pairs": "pair_margin", "labels": "is_good"}
"""The column of a preprocessed dataset with the values of its pairs, or of its labelled completions."""
VALUE_COLUMNS = {**PREFERENCE_COLUMNS, "steps": "num_steps"}
"""The column that tells what the rows of a preprocessed dataset are; texts have none."""
_KEY = "vectorlm"
"""Under it the summary stands in the description of a dataset."""

Rows = dict[str, tuple[int, str]]
"""For each reason the number of rows, and the name of the first."""


def steps_per_epoch(num_rows: int, rows_per_step: int) -> int:
    """Return the optimizer steps of an epoch, whose last may be short."""
    return -(-num_rows // rows_per_step)


@dataclass
class Summary:
    """Counts rows as they come in, are skipped, are cut and go out."""

    max_seq_len: int
    """Tokens of a row that training sees."""
    ignore_index: int
    rows_in: int = 0
    """Rows of the source, those that are skipped included; 0 where the dataset was made elsewhere."""
    skipped: Rows = field(default_factory=dict)
    """Rows that were left out."""
    remarks: Rows = field(default_factory=dict)
    """Rows that are there, with what their reader should know."""
    unread: list[str] = field(default_factory=list)
    """Columns of the source that nothing reads."""
    truncated: int = 0
    """Texts that were cut off at `max_seq_len`."""
    lost_tokens: int = 0
    """Tokens that these lost."""
    lost_loss_tokens: int = 0
    """Those of them that counted in the loss."""
    goes_on: int = 0
    """Times that a row ends in the middle of a text, which goes on in another."""
    begins_rows_alone: bool = False
    """Whether BOS stands before rows of several texts, and not before each text."""
    rows_out: int = 0
    """Rows to train on."""
    texts: int = 0
    """Texts in them, or parts of texts."""
    tokens: int = 0
    """Tokens of all rows."""
    loss_tokens: int = 0
    """Tokens within `max_seq_len` that count in the loss; nothing predicts the first of a text."""
    longest: int = 0
    """Tokens of the longest row."""
    long_rows: int = 0
    """Rows longer than `max_seq_len`."""
    cut_tokens: int = 0
    """Tokens that training cuts off long rows."""
    cut_loss_tokens: int = 0
    """Those of them that count in the loss."""
    has_pairs: bool = False
    """Whether each row holds two texts, of up to `max_seq_len` tokens each."""
    idle_rows: int = 0
    """Rows that have no token within `max_seq_len` that counts in the loss."""
    tokenizer: str = ""
    """Where the tokenizer was that made them; empty where that is not known, as the next."""
    vocabulary: str = ""
    """The digest of its `vocabulary_of`."""

    @classmethod
    def read(cls, dataset: Dataset) -> Summary | None:
        """Return what preprocessing said of `dataset`; None where it was made elsewhere."""
        return cls.parse(dataset.info.description)

    @classmethod
    def parse(cls, description: Any) -> Summary | None:
        """Return what preprocessing wrote into a dataset's description; None where nothing of it is there."""
        try:
            return cls(**json.loads(description)[_KEY])
        except (ValueError, KeyError, TypeError):
            return None

    @classmethod
    def of(cls, dataset: Dataset, max_seq_len: int, ignore_index: int) -> Summary:
        """Return what preprocessing said of `dataset`, counted for this length if it was made for another."""
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
        """Count the rows of `dataset` as training will see them."""
        totals = np.zeros(7, dtype=np.int64)
        self.longest = 0
        self.has_pairs = not set(PREFERENCE_COLUMNS.values()).isdisjoint(dataset.column_names)
        names = [each for each in ("labels", "attention_mask", "seq_lengths") if each in dataset.column_names]
        for table in dataset.select_columns(names).with_format("arrow").iter(ROWS_PER_COUNT):
            counts, longest = _count(table, self.max_seq_len, self.ignore_index, self.has_pairs)
            totals += counts
            self.longest = max(self.longest, longest)
        self.rows_out = len(dataset)
        self.texts, self.tokens, self.loss_tokens, self.long_rows, self.cut_tokens = totals[:5].tolist()
        self.cut_loss_tokens, self.idle_rows = totals[5:].tolist()

    @property
    def efficiency(self) -> float:
        """Share of `max_seq_len` that the tokens of a row take up in the mean, as training sees them; from 0 to 1."""
        num_full = self.texts if self.has_pairs else self.rows_out
        return (self.tokens - self.cut_tokens) / (num_full * self.max_seq_len)

    def why_skipped(self) -> str:
        """Say how many rows were left out, and why."""
        reasons = [f"{num:,} with {why} (first: {name})" for why, (num, name) in self.skipped.items()]
        return f"{sum(num for num, _ in self.skipped.values()):,}: {', '.join(reasons)}" if reasons else "0"

    def head(self) -> str:
        """Say in a line what there is to train on."""
        return (
            f"{_count_of(self.rows_out, 'row')} of {_count_of(self.texts, 'text')}, {self.tokens:,} tokens, of which "
            f"{self.loss_tokens:,} count in the loss"
        )

    def notes(self) -> Iterator[str]:
        """Yield what else there is to know, a sentence each."""
        if self.skipped:
            yield f"skipped of {_count_of(self.rows_in, 'row')} {self.why_skipped()}"
        if self.truncated:
            yield (
                f"cut off at max_seq_len: {_count_of(self.truncated, 'text')}, which lost {self.lost_tokens:,} tokens, "
                f"{self.lost_loss_tokens:,} of them counted in the loss"
            )
        if self.goes_on:
            yield (
                f"cut in the middle of a text: {self.goes_on:,} times. The rest is in another row, which does not see "
                "what came before (an EOS at such a cut does not count in the loss). Raise max_seq_len, or use "
                "packing_type: best_fit with truncate: True"
            )
        if self.begins_rows_alone:
            yield (
                "BOS stands before each row, not before each text of it, as packing_type: full joins them. Use "
                "best_fit for a model whose prompts begin with BOS"
            )
        if self.long_rows:
            yield (
                f"rows longer than max_seq_len={self.max_seq_len}: {self.long_rows:,}. Training will cut "
                f"{self.cut_tokens:,} tokens off them, {self.cut_loss_tokens:,} of which count in the loss. Set "
                "truncate: True or a packing_type, or raise max_seq_len"
            )
        if self.idle_rows:
            yield (
                f"{self.idle_rows:,} of {_count_of(self.rows_out, 'row')} have no counted token within "
                f"{self.max_seq_len}"
            )
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
        return "\n".join(
            table + [f"note: {note}." for note in self.notes() if not note.startswith("skipped")]
        )


def vocabulary_of(tokenizer: Any) -> str:
    """Return a digest of the tokens of a tokenizer and of their ids."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda each: each[1])
    return hashlib.blake2b(repr(tokens).encode(), digest_size=8).hexdigest()


def add_row(rows: Rows, reason: str, name: str) -> None:
    """Count one more row for a reason."""
    num, first = rows.get(reason, (0, name))
    rows[reason] = (num + 1, first)


def _count(table: Any, max_seq_len: int, ignore_index: int, is_pairs: bool) -> tuple[list[int], int]:
    """Return texts, tokens, counted ones, long rows, cut tokens, counted ones of these, idle rows; and the longest."""
    import pyarrow.compute as pc

    def flat(name: str) -> np.ndarray:
        return pc.list_flatten(table[name]).to_numpy(zero_copy_only=False)

    labels = flat("labels")
    lengths = pc.fill_null(pc.list_value_length(table["labels"]), 0).to_numpy().astype(np.int64)
    if is_pairs:
        lengths = flat("seq_lengths").astype(np.int64)  # Each text is a row of its own.
    row = np.repeat(np.arange(len(lengths)), lengths)
    kept = np.ones(len(labels), dtype=bool)
    # Columns of another length than the labels are an error of their own, with the row's name, when training reads it.
    if "attention_mask" in table.column_names and len(mask := flat("attention_mask")) == len(labels):
        kept = mask.astype(bool)
    lengths = np.bincount(row[kept], minlength=len(lengths))
    place = np.arange(kept.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    is_first = place == 0
    if "seq_lengths" in table.column_names and (texts := flat("seq_lengths")).sum() == len(labels):
        begins = np.zeros(len(labels) + 1, dtype=bool)
        begins[(texts.cumsum() - texts).astype(np.int64)] = True
        is_first |= begins[:-1][kept]
    counted = (labels[kept] != ignore_index) & ~is_first
    cut = place >= max_seq_len
    learned = np.bincount(row[kept][counted & ~cut], minlength=len(lengths))
    numbers = [
        is_first.sum(),
        kept.sum(),
        (counted & ~cut).sum(),
        (lengths > max_seq_len).sum(),
        cut.sum(),
        (counted & cut).sum(),
        (learned == 0).sum(),
    ]
    return [int(number) for number in numbers], int(lengths.max(initial=0))


def _count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else noun + 's'}"
