"""Parse the values of a config file with their places, and convert them to the types of the schema."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from vectorlm.errors import ConfigError
from vectorlm.settings import nearest


class Foreign(NamedTuple):
    """The settings that correspond to a name of another library."""

    places: tuple[str, ...]
    """Paths from the top of the config."""
    note: str

    @property
    def fix(self) -> str:
        """The advice in an error message."""
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
"""Our names for choices of other libraries; the last two belong to scale_rewards."""

FOREIGN: Mapping[str, Foreign] = dict(
    _read(Path(__file__).with_name("foreign.txt").read_text(encoding="utf-8"))
)
"""Settings by their name in another library; names with the same meaning here are left out."""

VERL_SECTIONS = ("actor_rollout_ref", "algorithm", "critic", "data", "reward", "trainer")
"""Sections at the top of verl's configs."""


def find_foreign(path: str) -> Foreign | None:
    """Return the entry of `FOREIGN` for the longest end of a dotted path: `rollout.n` before `n`."""
    parts = path.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((FOREIGN[end] for end in ends if end in FOREIGN), None)


STRICT = ConfigDict(strict=True)
_SHOWN_CHARACTERS = 60
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_UNIONS = (Union, types.UnionType)


def convert(hint: Any, entry: Entry, path: str) -> Any:
    """Return the value of `entry` as the type `hint`.

    Raises:
        ConfigError: The value has another type or breaks a rule of the type.
    """
    value = entry.plain()
    if value is None and get_origin(_unwrap(hint)[0]) is Mapping:
        return {}
    try:
        # A dataclass is a section, which takes no pydantic config; its mapping is read elsewhere.
        return TypeAdapter(hint, config=None if is_dataclass(hint) else STRICT).validate_python(value)
    except ValidationError as error:
        places = [part for detail in error.errors() for part in detail["loc"] if isinstance(part, int)]
        if isinstance(value, list) and places and places[0] < len(value):
            # Report the item, which has its own line.
            convert(next(_items(hint)), entry.value[places[0]], f"{path}[{places[0]}]")
        rule = f"must be {describe(hint)}"
        raise ConfigError(describe_refusal(path, value, rule, _fix(hint, value), entry.origin)) from None


def describe(hint: Any) -> str:
    """Complete the sentence "the value must be ..." for a type."""
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
    if get_origin(base) is tuple:
        return "a list"
    if get_origin(base) in _UNIONS:
        return ", or ".join("null" if kind is type(None) else describe(kind) for kind in get_args(base))
    return "a section (`key: value` lines)"


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one `ConfigError` that lists all problems, if there are any."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} problems:\n" + "\n".join(f"  - {text}" for text in problems))


def describe_refusal(path: str, value: Any, rule: str, fix: str = "", origin: str = "") -> str:
    """Return an error message: ``a.b=value rule. Fix. (origin)``."""
    parts = [f"{path}={show(value)} {rule}.", fix, f"({origin})" if origin else ""]
    return " ".join(part for part in parts if part)


def show(value: Any) -> str:
    """Return a value as YAML, cut off if long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _unwrap(hint: Any) -> tuple[Any, FieldInfo]:
    """Return a type without its annotations, and its `FieldInfo`."""
    if get_origin(hint) is not Annotated:
        return hint, FieldInfo()
    base, *notes = get_args(hint)
    return base, next((note for note in notes if isinstance(note, FieldInfo)), FieldInfo())


def _items(hint: Any) -> Iterator[Any]:
    """Yield the item types of the lists that a type accepts."""
    base = _unwrap(hint)[0]
    if get_origin(base) is tuple:
        yield get_args(base)[0]
    elif get_origin(base) in _UNIONS:
        yield from (item for kind in get_args(base) for item in _items(kind))


def _fix(hint: Any, value: Any) -> str:
    """Return advice on a valid value."""
    base, info = _unwrap(hint)
    if get_origin(base) in _UNIONS and not info.examples:
        return " ".join(filter(None, (_fix(kind, value) for kind in get_args(base))))
    if get_origin(base) is Mapping and is_dataclass(value):
        return f"Pass the arguments of {type(value).__name__} as a dictionary."
    if get_origin(base) is Literal:
        choices = [str(choice) for choice in get_args(base)]
        # TRL's sigmoid is dpo, and looks like simpo.
        foreign = FOREIGN_VALUES.get(str(value).casefold())
        return f"Did you mean {foreign!r}?" if foreign in choices else nearest(str(value), choices)
    if get_origin(base) is Mapping and isinstance(value, str | list) and value:
        names = [value] if isinstance(value, str) else value
        return f"Write {{{', '.join(f'{name}: VALUE' for name in names)}}}."
    is_text = base is str or (get_origin(base) in _UNIONS and str in get_args(base))
    if is_text and type(value) in (int, float, bool):
        return "Put quotes around it."
    if isinstance(value, str) and _fits(hint, value):
        return f"Write {value} without quotes."
    return f"Use {info.examples[0]}, for example." if info.examples else ""


def _fits(hint: Any, text: str) -> bool:
    """Return whether a quoted value would be valid without quotes."""
    try:
        entry = parse_yaml(text, lambda line: "")
        return not isinstance(entry.value, str) and convert(hint, entry, "") is not None
    except ConfigError:
        return False


_MAP, _SEQ, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "merge"))
_FLOAT = "tag:yaml.org,2002:float"
# YAML 1.1 reads `1e-5` and `1.0e5` as text, because a number needs a dot and a signed exponent.
_EXPONENT_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)[eE][-+]?[0-9]+$")

MAX_VALUES = 20_000
"""Largest number of values in one YAML text; nested anchors could turn a few lines into millions."""


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also reads `1e-5` as a number, and `2026-11-27` as text."""


class Dumper(yaml.SafeDumper):
    """The dumper for `Loader`: it quotes text that `Loader` would read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write out repeated values."""
        return True


# JSON, which checkpoints use, has no dates.
Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in found if resolver[0] != "tag:yaml.org,2002:timestamp"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _resolver in (Loader, Dumper):
    _resolver.add_implicit_resolver(_FLOAT, _EXPONENT_FLOAT, list("-+.0123456789"))


@dataclass
class Entry:
    """A value and its place in the file."""

    value: Any
    """A dict or a list of entries, or a scalar."""
    origin: str
    """``file:line``, or the command-line option."""

    def plain(self) -> Any:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [entry.plain() for entry in self.value]
        return self.value


def parse_yaml(text: str | bytes, origin_of_line: Callable[[int], str]) -> Entry:
    """Parse one YAML document; `origin_of_line` returns the place of a line, counted from 1."""
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Entry(None, origin_of_line(1))
        return _Reader(loader, origin_of_line).read(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        line = mark.line + 1 if mark is not None else 1
        raise ConfigError(f"not valid YAML: {what} ({origin_of_line(line)}).") from error
    except RecursionError:
        raise ConfigError(f"not valid YAML: it contains itself ({origin_of_line(1)}).") from None


class _Reader:
    """A converter from YAML nodes to entries."""

    def __init__(self, loader: Loader, origin_of_line: Callable[[int], str]) -> None:
        self._loader = loader
        self._origin_of_line = origin_of_line
        self._num_read = 0

    def read(self, node: yaml.Node, origin: str | None = None) -> Entry:
        self._num_read += 1
        if self._num_read > MAX_VALUES:
            raise ConfigError(f"not valid YAML: its anchors stand for more than {MAX_VALUES} values.")
        origin = origin or self._origin_of_line(node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return Entry(self._read_mapping(node), origin)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            return Entry([self.read(item) for item in node.value], origin)
        try:
            return Entry(self._loader.construct_object(node, deep=True), origin)
        except ValueError as error:  # such as the date 2024-13-01
            raise ConfigError(f"not valid YAML: {error} ({origin}).") from error

    def _read_mapping(self, node: yaml.MappingNode) -> dict[Hashable, Entry]:
        own: dict[Hashable, Entry] = {}
        merged: dict[Hashable, Entry] = {}
        for key_node, value_node in node.value:
            origin = self._origin_of_line(key_node.start_mark.line + 1)
            if key_node.tag == _MERGE:
                merged |= self._read_merge(value_node, origin)
                continue
            key = self._loader.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise ConfigError(f"not valid YAML: a key must be a single value, not {key!r} ({origin}).")
            if key in own:
                raise ConfigError(
                    f"duplicate setting '{key}' ({origin}): it was set before at {own[key].origin}. "
                    "Remove one of the two."
                )
            own[key] = self.read(value_node, origin)
        return {**merged, **own}

    def _read_merge(self, node: yaml.Node, origin: str) -> dict[Hashable, Entry]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[Hashable, Entry] = {}
        for source in reversed(sources):
            if not isinstance(source, yaml.MappingNode):
                raise ConfigError(f"not valid YAML: '<<' must be followed by a mapping ({origin}).")
            merged |= self._read_mapping(source)
        return merged
