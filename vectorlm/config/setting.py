"""One key of the schema: its type, default and explanation, read off the dataclasses."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any, get_args, get_origin, get_type_hints

from vectorlm.config.schema import Config


@dataclass(frozen=True)
class Setting:
    """What the schema says about one key."""

    name: str
    """The key as it is written in YAML."""
    hint: Any
    """Its type with the rules on it."""
    default: Any
    """Its value where the key is left out; `MISSING` where it may not be."""
    doc: str
    """The line under the field."""
    field_name: str
    """What the dataclass calls it."""

    @property
    def is_required(self) -> bool:
        """Whether the key must be given."""
        return self.default is MISSING

    @property
    def section(self) -> type | None:
        """The dataclass behind the key, or None where it holds a value of its own."""
        candidates = (self.hint, *get_args(self.hint))
        return next((kind for kind in candidates if isinstance(kind, type) and is_dataclass(kind)), None)

    @property
    def is_mapping(self) -> bool:
        """Whether the key holds a mapping whose own keys are free."""
        return any(get_origin(kind) is Mapping for kind in (self.hint, *get_args(self.hint)))


@cache
def settings_of(cls: type) -> dict[str, Setting]:
    """Return the settings of a section, by key, in the order of the schema."""
    hints = get_type_hints(cls, include_extras=True)
    docs = _field_docs(cls)
    settings = {}
    for entry in fields(cls):
        if entry.metadata.get("is_setting", True):
            default = entry.default if entry.default_factory is MISSING else entry.default_factory()
            key = key_of(entry.name)
            settings[key] = Setting(key, hints[entry.name], default, docs[entry.name], entry.name)
    return settings


def key_of(field_name: str) -> str:
    """Return what YAML calls a field: words of Python's own, like ``async``, bear an underscore as fields."""
    return field_name.rstrip("_")


@cache
def all_paths(cls: type = Config, prefix: str = "") -> tuple[str, ...]:
    """Return the dotted path of every setting below a section."""
    paths: list[str] = []
    for name, setting in settings_of(cls).items():
        paths.append(prefix + name)
        if setting.section is not None:
            paths.extend(all_paths(setting.section, f"{prefix}{name}."))
    return tuple(paths)


def _field_docs(cls: type) -> dict[str, str]:
    """Return the string literal under each field, which Python itself does not keep."""
    tree = ast.parse(inspect.getsource(cls))
    assert isinstance(tree.body[0], ast.ClassDef)
    body = tree.body[0].body
    docs = {}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(statement.target, ast.Name)
            docs[statement.target.id] = str(ast.literal_eval(following.value))
    return docs
