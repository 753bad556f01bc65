"""What other libraries call the settings of this one; the table is foreign.txt, beside this file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Foreign(NamedTuple):
    """The settings that a foreign name stands for."""

    places: tuple[str, ...]
    """From the top of the config."""
    note: str

    @property
    def fix(self) -> str:
        """What to write instead."""
        *others, last = [f"'{place}'" for place in self.places] or [""]
        asked = f"{', '.join(others)} or {last}" if others else last
        return " ".join(part for part in (asked and f"Did you mean {asked}?", self.note) if part)


def _read(table: str) -> Iterator[tuple[str, Foreign]]:
    for line in re.sub(r"\n +", " ", table).splitlines():
        if line and not line.startswith("#"):
            names, places, note = (part.strip() for part in f"{line} |".split("|")[:3])
            yield from ((name, Foreign(tuple(places.split()), note)) for name in names.split())


FOREIGN_VALUES: Mapping[str, str] = {
    "sigmoid": "dpo",
    "bfd": "best_fit",
    "wrapped": "full",
    "low_var_kl": "k3",
    "kl": "k1",
    "mse": "k2",
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "sequence_mask": "mask",
    "true": "group",
    "false": "none",
}
"""What values of other libraries are called here, where a setting has such a choice; the last two of scale_rewards."""

FOREIGN: Mapping[str, Foreign] = dict(_read(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")))
"""By the name that somebody may write here; names that both sides use alike are left out."""
