"""Reports of long waits on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
AFTER_S, EVERY_S, TICK_S = 3.0, 15.0, 0.5
"""Seconds until the first line; between two lines; between two updates of a terminal's line."""


def escape_what_the_console_cannot_show() -> None:
    """Print characters that the console lacks as escapes instead of raising UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print a line on standard error, above this process's progress bars."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


@contextmanager
def report_wait(
    what: str,
    *,
    is_on: bool = True,
    detail: Callable[[], str] = str,
    done: Callable[[], int] = int,
    total: int = 0,
) -> Iterator[None]:
    """Print `what` if the block takes longer than `AFTER_S`, and at the end how long it took.

    A terminal shows one line that changes, with a bar if `done` counts up to `total`; elsewhere a line is printed every
    `EVERY_S`. `is_on` is False on ranks that print nothing.
    """
    began, ended, has_spoken = time.monotonic(), threading.Event(), threading.Event()

    def text() -> str:
        return f"{what}: " + ", ".join(filter(None, [_how_far(began, done(), total), detail()]))

    def tell() -> None:
        if ended.wait(AFTER_S):
            return
        has_spoken.set()
        # Imported late: `vectorlm check` does not need it.
        from tqdm import tqdm

        is_plain, form = not sys.stderr.isatty(), "{desc} |{bar}|" if total else "{desc}"
        how = {"bar_format": form, "leave": False, "dynamic_ncols": True, "disable": is_plain}
        with tqdm(desc=text(), total=total, **how) as bar:
            while not ended.is_set():
                bar.n = done()
                bar.set_description_str(text())
                if is_plain:
                    say(text())
                ended.wait(EVERY_S if is_plain else TICK_S)

    teller = threading.Thread(target=tell, name="wait", daemon=True)
    if is_on:
        teller.start()
    try:
        yield
    finally:
        ended.set()
        if is_on:
            teller.join(TICK_S)
    if has_spoken.is_set():
        say(f"{what}: done after {span(time.monotonic() - began)}")


def count_rows(rows: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Yield `rows`, and report how many of `total` were taken if it takes long."""
    num = 0
    with report_wait(f"{what}, rows", done=lambda: num, total=total):
        for row in rows:
            yield row
            num += 1


class Progress:
    """Progress lines of one process; silent in a terminal, where a bar is shown instead."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._began = self._said = time.monotonic()

    def add(self, num: int) -> None:
        """Count `num` more items as done."""
        self._done += num
        if not sys.stderr.isatty() and time.monotonic() - self._said >= EVERY_S:
            self._said = time.monotonic()
            say(f"{self._what}: {_how_far(self._began, self._done, self._total)}")


def _how_far(began: float, count: int, total: int) -> str:
    """Return progress, time so far and time left of work that began at `began` on the monotonic clock."""
    seconds = time.monotonic() - began
    left = f"about {span(seconds * (total - count) / count)} left" if count else ""
    counted = f"{count} of {total}" if total else ""
    return ", ".join(filter(None, [counted, f"{span(seconds)} so far", left]))


def span(seconds: float) -> str:
    """Return a time as text: 42 s, 3 min, 125 min."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
