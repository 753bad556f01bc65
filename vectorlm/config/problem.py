"""The sentences that say what is wrong with a setting."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from vectorlm.config.setting import all_paths, settings_of
from vectorlm.errors import ConfigError

_SHOWN_CHARACTERS = 60


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one `ConfigError` that lists all problems; do nothing when there are none."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} problems:\n" + "\n".join(f"  - {text}" for text in problems))


def describe_refusal(path: str, value: Any, rule: str, fix: str = "", origin: str = "") -> str:
    """Say that a value breaks a rule: ``a.b=value rule. Fix. (origin)``."""
    parts = [f"{path}={show(value)} {rule}.", fix, f"({origin})" if origin else ""]
    return " ".join(part for part in parts if part)


def describe_unknown(section: type, prefix: str, key: Any, origin: str) -> str:
    """Say that a section has no such key, and name the nearest one that exists."""
    known = list(settings_of(section))
    nearest = difflib.get_close_matches(str(key), known, n=1)
    candidates = [prefix + name for name in nearest]
    # A key of the right name in the wrong section: name the section where it belongs.
    candidates += [path for path in all_paths() if path.rpartition(".")[2] == key]
    if candidates:
        fix = f"Did you mean '{candidates[0]}'?"
    else:
        place = f"'{prefix.removesuffix('.')}'" if prefix else "the top level"
        fix = f"The settings of {place} are: {', '.join(known)}."
    return f"unknown setting '{prefix}{key}' ({origin}). {fix}"


def describe_missing(section: type, prefix: str, names: Sequence[str], origin: str) -> str:
    """Say which keys a section lacks, with what each of them means."""
    settings = settings_of(section)
    lacking = [f"'{prefix}{name}' ({settings[name].doc.rstrip('.')})" for name in names]
    noun = "setting" if len(names) == 1 else "settings"
    return f"missing {noun} {', '.join(lacking)} ({origin}). Add {'it' if len(names) == 1 else 'them'}."


def show(value: Any) -> str:
    """Write a value the way YAML does, cut off when long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
