"""A YAML text as a tree of values that remember where they were written."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import yaml

from vectorlm.errors import ConfigError

_MAP, _SEQ, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "merge"))
_FLOAT = "tag:yaml.org,2002:float"
# YAML 1.1 takes `1e-5` and `1.0e5` for text, because it wants both a dot and a signed exponent.
_EXPONENT_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)[eE][-+]?[0-9]+$")

MAX_VALUES = 20_000
"""Values of one text. Anchors within anchors make millions of a few lines."""


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also reads `1e-5` as a number, and `2026-11-27` as text."""


class Dumper(yaml.SafeDumper):
    """The dumper for `Loader`: it quotes every text that `Loader` would take for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value out each time that it occurs."""
        return True


# A date is no value of JSON, and so of no checkpoint.
Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in found if resolver[0] != "tag:yaml.org,2002:timestamp"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _resolver in (Loader, Dumper):
    _resolver.add_implicit_resolver(_FLOAT, _EXPONENT_FLOAT, list("-+.0123456789"))


@dataclass
class Entry:
    """A value and the place where it was written."""

    value: Any
    """A dict or a list of entries, or a scalar."""
    origin: str
    """``file:line``, or the command-line option."""

    def plain(self) -> Any:
        """Return the value without the places."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [entry.plain() for entry in self.value]
        return self.value


def parse_yaml(text: str | bytes, origin_of_line: Callable[[int], str]) -> Entry:
    """Read one YAML document; `origin_of_line` names the place of a line, counted from 1."""
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
    """Turns YAML's nodes into entries."""

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
