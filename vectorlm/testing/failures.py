"""What a check says when it fails: its line, and the values of the names in it."""

from __future__ import annotations

import functools
import linecache
import re
import traceback
from collections.abc import Callable
from typing import Any

SHOWN_CHARACTERS = 200


def speaking(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return `check` with a text in each of its errors: outside pytest a bare `assert` has none."""

    @functools.wraps(check)
    def speaks(subject: Any) -> None:
        try:
            check(subject)
        except AssertionError as error:
            if str(error):
                raise
            raise AssertionError(_failed_line(error)) from error

    return speaks


def _failed_line(error: AssertionError) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    first = place.lineno or 0
    lines = [
        linecache.getline(place.filename, line) for line in range(first, (place.end_lineno or first) + 1)
    ]
    source = " ".join(line.strip() for line in lines)
    # The subject holds whole engines, and everybody knows it.
    names = [name for name in frame.f_locals if name != "subject" and re.search(rf"\b{name}\b", source)]
    values = [f"{name} = {repr(frame.f_locals[name])[:SHOWN_CHARACTERS]}" for name in names]
    return "; ".join([source, *values])
