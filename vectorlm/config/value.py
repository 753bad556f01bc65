"""One written value turned into the type that the schema asks for, or refused in a sentence."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from vectorlm.config.source import Entry, parse_yaml
from vectorlm.errors import ConfigError
from vectorlm.settings import AlsoWritten, Rule

_SHOWN_CHARACTERS = 60
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def convert(hint: Any, entry: Entry, path: str) -> Any:
    """Return the value of `entry` as the schema's type `hint`.

    Raises:
        ConfigError: the value is of another type or breaks the rule on the type.
    """
    base, rule, spellings = _unwrap(hint)
    if isinstance(entry.value, str) and entry.value in spellings:
        return spellings[entry.value]
    try:
        value = _convert_base(base, entry, path)
    except _WrongType:
        raise ConfigError(_refusal(hint, entry, path)) from None
    if rule is not None and not rule.holds(value):
        raise ConfigError(_refusal(hint, entry, path))
    return value


def describe(hint: Any) -> str:
    """Complete the sentence "the value must be ..." for a type of the schema."""
    base, rule, _ = _unwrap(hint)
    if rule is not None:
        return rule.text
    if base in _NAMES:
        return _NAMES[base]
    if get_origin(base) is Literal:
        return "one of " + ", ".join(get_args(base))
    if get_origin(base) is Mapping or base is Mapping:
        return "a mapping"
    if get_origin(base) in (Union, types.UnionType):
        return ", or ".join("null" if kind is type(None) else describe(kind) for kind in get_args(base))
    if get_origin(base) is tuple:
        return "a list"
    return "a section (`key: value` lines)"


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


def show(value: Any) -> str:
    """Write a value the way YAML does, cut off when long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


class _WrongType(Exception):
    """The value is not of the type asked for; the caller knows how to say so."""


def _unwrap(hint: Any) -> tuple[Any, Rule | None, Mapping[str, str]]:
    if get_origin(hint) is not Annotated:
        return hint, None, {}
    base, *notes = get_args(hint)
    rule = next((note for note in notes if isinstance(note, Rule)), None)
    spellings = next((note.spellings for note in notes if isinstance(note, AlsoWritten)), {})
    return base, rule, spellings


def _convert_base(base: Any, entry: Entry, path: str) -> Any:
    value, kind = entry.value, get_origin(base)
    if kind is Literal:
        # YAML takes an `off` without quotes for false.
        word = "off" if value is False else value
        if isinstance(word, str) and word in get_args(base):
            return word
    elif kind is Mapping:
        if value is None or isinstance(value, dict):
            return {} if value is None else entry.plain()
    elif kind is tuple:
        return _convert_list(get_args(base), entry, path)
    elif kind in (Union, types.UnionType):
        return _convert_union(get_args(base), entry, path)
    elif base is float and type(value) in (int, float):
        return float(value)
    elif type(value) is base:  # not isinstance: True is no integer here
        return value
    raise _WrongType


def _convert_list(items: tuple[Any, ...], entry: Entry, path: str) -> tuple[Any, ...]:
    if not isinstance(entry.value, list):
        raise _WrongType
    if items[-1] is not Ellipsis and len(items) != len(entry.value):
        raise _WrongType
    return tuple(convert(items[0], item, f"{path}[{index}]") for index, item in enumerate(entry.value))


def _convert_union(kinds: tuple[Any, ...], entry: Entry, path: str) -> Any:
    if entry.value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is not type(None) and isinstance(entry.value, list) in _takes_lists(kind):
            # A kind with a rule speaks for itself; any other is refused in the name of the whole union.
            return (convert if get_origin(kind) is Annotated else _convert_base)(kind, entry, path)
    raise _WrongType


def _takes_lists(kind: Any) -> set[bool]:
    """Whether a kind takes lists, or single values, or as a union of its own both."""
    base = _unwrap(kind)[0]
    is_union = get_origin(base) in (Union, types.UnionType)
    return {get_origin(each) is tuple for each in (get_args(base) if is_union else (base,))}


def _refusal(hint: Any, entry: Entry, path: str) -> str:
    value = entry.plain()
    return describe_refusal(path, value, f"must be {describe(hint)}", _fix(hint, value), entry.origin)


def _fix(hint: Any, value: Any) -> str:
    """Name a value that would do."""
    kinds = [_unwrap(kind) for kind in (hint, *get_args(hint))]
    choices = [choice for base, _, _ in kinds if get_origin(base) is Literal for choice in get_args(base)]
    if choices:
        by_folded = {choice.casefold(): choice for choice in choices}
        near = difflib.get_close_matches(str(value).casefold(), by_folded, n=1)
        return f"Did you mean '{by_folded[near[0]]}'?" if near else ""
    if any(base is str for base, _, _ in kinds) and type(value) in (int, float, bool):
        return "Put quotes around it."
    if isinstance(value, str) and _fits(hint, value):
        return f"Write {value} without quotes."
    example = next((rule.example for _, rule, _ in kinds if rule is not None), None)
    return f"Use {example}, for example." if example else ""


def _fits(hint: Any, text: str) -> bool:
    """Whether a quoted value would do without its quotes."""
    try:
        entry = parse_yaml(text, lambda line: "")
        return not isinstance(entry.value, str) and convert(hint, entry, "") is not None
    except ConfigError:
        return False
