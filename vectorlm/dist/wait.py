"""Waits that say on standard error what they are for, once they take longer than a moment."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

AFTER_S, EVERY_S, TICK_S = 3.0, 15.0, 0.5
"""Silence at first; between two lines; between two looks of a terminal's line."""


def say(text: str) -> None:
    """Print a line on standard error, above this process's progress bars."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


@contextmanager
def aloud(
    what: str,
    *,
    after_s: float = AFTER_S,
    is_on: bool = True,
    detail: Callable[[], str] = str,
    done: Callable[[], int] = int,
    total: int = 0,
) -> Iterator[None]:
    """Say what the block does where it takes longer than `after_s`, and at the end how long it took.

    In a terminal this is a line that changes, with a bar where `done` counts up to `total`; elsewhere a line is printed
    every `EVERY_S`. `is_on` is False on ranks that say nothing.
    """
    began, ended, has_spoken = time.monotonic(), threading.Event(), threading.Event()

    def text() -> str:
        seconds, count = time.monotonic() - began, done()
        parts = [f"{count} of {total}"] * bool(total) + [f"{span(seconds)} so far"]
        if count:
            parts.append(f"about {span(seconds * (total - count) / count)} left")
        return f"{what}: {', '.join(filter(None, [*parts, detail()]))}"

    def tell() -> None:
        bar: Any = None
        while not ended.wait(TICK_S if bar is not None else EVERY_S if has_spoken.is_set() else after_s):
            has_spoken.set()
            if not sys.stderr.isatty():
                say(text())
                continue
            if bar is None:
                from tqdm import tqdm

                form = "{desc} |{bar}|" if total else "{desc}"
                bar = tqdm(total=total, bar_format=form, leave=False, dynamic_ncols=True, file=sys.stderr)
            bar.n = done()
            bar.set_description_str(text())
        if bar is not None:
            bar.close()

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


def span(seconds: float) -> str:
    """Return a time as a reader says it: 42 s, 3 min, 2 h 5 min."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
