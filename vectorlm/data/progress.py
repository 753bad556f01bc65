"""Progress: a bar with the time left in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
_LINE_EVERY_S = 10.0


class PlainProgress:
    """Writes how far the work is to the standard error, unless that is a terminal; there a bar shows it.

    Args:
        what: The work.
        total: Rows of it.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._start = self._last = time.monotonic()

    def add(self, num: int) -> None:
        """Note that `num` more rows are done."""
        self._done += num
        now = time.monotonic()
        if sys.stderr.isatty() or now - self._last < _LINE_EVERY_S:
            return
        self._last = now
        left = (now - self._start) * (self._total - self._done) / max(self._done, 1)
        share = 100 * self._done / max(self._total, 1)
        print(f"{self._what}: {share:.0f} %, {left:.0f} s left", file=sys.stderr, flush=True)


def with_progress(rows: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Yield `rows`, and show how many of `total` have been taken."""
    from tqdm import tqdm

    plain = PlainProgress(what, total)
    for row in tqdm(rows, total=total, desc=what, unit=" rows", disable=not sys.stderr.isatty()):
        yield row
        plain.add(1)


@contextmanager
def bars_in_terminals() -> Iterator[None]:
    """Let the library datasets draw its bars in terminals alone."""
    import datasets

    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
