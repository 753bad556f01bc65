"""The summary: what preprocessing made, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from vectorlm.data.pack import TokenisedText


@dataclass
class Summary:
    """Counts rows as they come in, are skipped and go out."""

    max_seq_len: int
    ignore_index: int
    rows_in: int = 0
    """Rows of the source, those that are skipped included."""
    rows_out: int = 0
    """Rows to train on."""
    tokens: int = 0
    """Tokens of all rows."""
    loss_tokens: int = 0
    """Tokens that count in the loss; the first of a text does not, because nothing predicts it."""
    longest: int = 0
    """Tokens of the longest row."""
    long_rows: int = 0
    """Rows longer than `max_seq_len`."""
    cut_tokens: int = 0
    """Tokens that training will cut off long rows."""
    skipped: dict[str, tuple[int, str]] = field(default_factory=dict)
    """For each reason the number of rows that were left out, and the name of the first."""

    def skip(self, reason: str, name: str) -> None:
        """Count a row that is left out."""
        num, first = self.skipped.get(reason, (0, name))
        self.skipped[reason] = (num + 1, first)

    def add(self, row: TokenisedText) -> None:
        """Count a row to train on."""
        self.rows_out += 1
        self.tokens += len(row)
        self.longest = max(self.longest, len(row))
        firsts = accumulate(row.seq_lengths[:-1], initial=0)
        counted = len(row) - row.labels.count(self.ignore_index)
        self.loss_tokens += counted - sum(row.labels[first] != self.ignore_index for first in firsts)
        if len(row) > self.max_seq_len:
            self.long_rows += 1
            self.cut_tokens += len(row) - self.max_seq_len

    @property
    def efficiency(self) -> float:
        """Share of `max_seq_len` that the tokens of a row take up in the mean, as training sees them; from 0 to 1."""
        return (self.tokens - self.cut_tokens) / (self.rows_out * self.max_seq_len)

    def why_skipped(self) -> str:
        """Say how many rows were left out, and why."""
        reasons = [f"{num:,} with {why} (first: {name})" for why, (num, name) in self.skipped.items()]
        return f"{sum(num for num, _ in self.skipped.values()):,}: {', '.join(reasons)}" if reasons else "0"

    def __str__(self) -> str:
        lines = {
            "rows in": f"{self.rows_in:,}",
            "skipped": self.why_skipped(),
            "rows out": f"{self.rows_out:,}",
            "tokens": f"{self.tokens:,}, of which {self.loss_tokens:,} count in the loss",
            "longest row": f"{self.longest:,} tokens",
            "efficiency": f"{100 * self.efficiency:.1f} % of rows out x max_seq_len={self.max_seq_len}",
        }
        text = "\n".join(f"  {name:12}{value}" for name, value in lines.items())
        if not self.long_rows:
            return text
        return (
            f"{text}\nwarning: rows longer than max_seq_len={self.max_seq_len}: {self.long_rows:,}. Training will cut "
            f"{self.cut_tokens:,} tokens off them. Set truncate: True or a packing_type, or raise max_seq_len."
        )
