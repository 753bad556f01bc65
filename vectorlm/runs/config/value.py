"""One written value turned into the type that the schema asks for, or refused in a sentence."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from vectorlm.errors import ConfigError
from vectorlm.runs.config.source import Entry, parse_yaml
from vectorlm.settings import nearest


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

FOREIGN: Mapping[str, Foreign] = dict(
    _read(Path(__file__).with_name("foreign.txt").read_text(encoding="utf-8"))
)
"""By the name that somebody may write here; names that both sides use alike are left out."""


STRICT = ConfigDict(strict=True)
_SHOWN_CHARACTERS = 60
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_UNIONS = (Union, types.UnionType)


def convert(hint: Any, entry: Entry, path: str) -> Any:
    """Return the value of `entry` as the schema's type `hint`.

    Raises:
        ConfigError: the value is of another type or breaks the rule on the type.
    """
    value = entry.plain()
    if value is None and get_origin(_unwrap(hint)[0]) is Mapping:
        return {}
    try:
        # A dataclass is a section, whose mapping is not read here: it takes no config, and anything else is refused.
        return TypeAdapter(hint, config=None if is_dataclass(hint) else STRICT).validate_python(value)
    except ValidationError as error:
        places = [part for detail in error.errors() for part in detail["loc"] if isinstance(part, int)]
        if isinstance(value, list) and places and places[0] < len(value):
            # Refused in the name of the item, with its own line.
            convert(next(_items(hint)), entry.value[places[0]], f"{path}[{places[0]}]")
        rule = f"must be {describe(hint)}"
        raise ConfigError(describe_refusal(path, value, rule, _fix(hint, value), entry.origin)) from None


def describe(hint: Any) -> str:
    """Complete the sentence "the value must be ..." for a type of the schema."""
    base, info = _unwrap(hint)
    if info.description is not None:
        return info.description
    if base in _NAMES:
        return _NAMES[base]
    if get_origin(base) is Literal:
        choices = get_args(base)
        return show(choices[0]) if len(choices) == 1 else "one of " + ", ".join(choices)
    if get_origin(base) is Mapping:
        return "a mapping"
    if get_origin(base) in _UNIONS:
        return ", or ".join("null" if kind is type(None) else describe(kind) for kind in get_args(base))
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


def _unwrap(hint: Any) -> tuple[Any, FieldInfo]:
    """Return a type without its annotations, and what they say to a reader."""
    if get_origin(hint) is not Annotated:
        return hint, FieldInfo()
    base, *notes = get_args(hint)
    return base, next((note for note in notes if isinstance(note, FieldInfo)), FieldInfo())


def _items(hint: Any) -> Iterator[Any]:
    """Yield the type of a list's items, where a type takes lists."""
    base = _unwrap(hint)[0]
    if get_origin(base) is tuple:
        yield get_args(base)[0]
    elif get_origin(base) in _UNIONS:
        yield from (item for kind in get_args(base) for item in _items(kind))


def _fix(hint: Any, value: Any) -> str:
    """Name a value that would do."""
    base, info = _unwrap(hint)
    if get_origin(base) in _UNIONS and not info.examples:
        return " ".join(filter(None, (_fix(kind, value) for kind in get_args(base))))
    if get_origin(base) is Literal:
        choices = [str(choice) for choice in get_args(base)]
        # TRL's sigmoid is dpo, and looks like simpo.
        foreign = FOREIGN_VALUES.get(str(value).casefold())
        return f"Did you mean {foreign!r}?" if foreign in choices else nearest(str(value), choices)
    is_text = base is str or (get_origin(base) in _UNIONS and str in get_args(base))
    if is_text and type(value) in (int, float, bool):
        return "Put quotes around it."
    if isinstance(value, str) and _fits(hint, value):
        return f"Write {value} without quotes."
    return f"Use {info.examples[0]}, for example." if info.examples else ""


def _fits(hint: Any, text: str) -> bool:
    """Whether a quoted value would do without its quotes."""
    try:
        entry = parse_yaml(text, lambda line: "")
        return not isinstance(entry.value, str) and convert(hint, entry, "") is not None
    except ConfigError:
        return False
