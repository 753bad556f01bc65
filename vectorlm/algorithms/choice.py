"""Arguments that are one of a few names."""

from __future__ import annotations

from typing import Any, get_args


def require_choice(name: str, value: str, kind: Any) -> None:
    """Raise ValueError where `value` is none of the names of the Literal `kind`."""
    if value not in get_args(kind):
        raise ValueError(f"{name}={value!r} is unknown: it must be one of {', '.join(get_args(kind))}.")
