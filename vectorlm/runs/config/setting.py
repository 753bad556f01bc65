"""Keys of the schema: their types, defaults and explanations, read from the dataclasses."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.algorithms.settings import AlgorithmSettings
from vectorlm.runs.config.schema import AlgorithmChoice, Config
from vectorlm.runs.config.value import describe_refusal
from vectorlm.settings import ReadIf

_GIVEN: Any = object()


@dataclass(frozen=True)
class Setting:
    """One key of the schema."""

    name: str
    """The key in YAML."""
    hint: Any
    """Its type with rules."""
    default: Any
    """Its value if the key is left out; `MISSING` if it is required."""
    owner: type
    """The dataclass that declares it."""
    place: tuple[str, ...]
    """The fields from the section's dataclass down to the value."""
    null: str = ""
    """Where the value comes from if the key is null or missing; empty for the default."""

    @property
    def doc(self) -> str:
        """The text under the field."""
        text = _docs_in(self.owner).get(self.place[-1], "")
        return f"{text.rstrip('.')}; null means {self.null}." if self.null else text

    @property
    def is_required(self) -> bool:
        """Whether the key must be given."""
        return self.default is MISSING

    @property
    def section(self) -> type | None:
        """The dataclass of a section; None for a plain value."""
        return next(
            (kind for kind in _kinds_of(self.hint) if isinstance(kind, type) and is_dataclass(kind)), None
        )

    @property
    def item_section(self) -> type | None:
        """The dataclass of the values if the key holds a mapping of sections; otherwise None."""
        item = get_args(self.hint)[-1] if get_origin(self.hint) is Mapping else None
        return item if is_dataclass(item) and isinstance(item, type) else None

    @property
    def read_if(self) -> tuple[ReadIf, ...]:
        """The conditions for the setting to have an effect."""
        notes = (
            note for kind in (self.hint, *get_args(self.hint)) for note in getattr(kind, "__metadata__", ())
        )
        return tuple(note for note in notes if isinstance(note, ReadIf))


def _kinds_of(hint: Any) -> Iterator[Any]:
    """Yield the alternatives of a type, without their rules."""
    if get_origin(hint) in (Annotated, Union, UnionType):
        for argument in get_args(hint):
            yield from _kinds_of(argument)
    else:
        yield hint


@cache
def settings_of(cls: type, algorithm: type | None = None) -> dict[str, Setting]:
    """Return the settings of a section, by key, in the order of the schema.

    The section ``rl.algorithm`` has the settings of the class `algorithm`, or of all algorithms if it is None.
    """
    found = list(_settings_in(cls, algorithm))
    settings = {setting.name: setting for setting in found}
    assert len(settings) == len(found), f"{cls.__name__} declares a key twice"
    return settings


def _settings_in(cls: type, algorithm: type | None, above: tuple[str, ...] = ()) -> Iterator[Setting]:
    hints = get_type_hints(cls, include_extras=True)
    for entry in fields(cls):
        place, metadata = (*above, entry.name), entry.metadata
        if "partial" in metadata and algorithm is not None:
            yield from _settings_in(algorithm, None, place)
        elif "partial" in metadata:
            optional = {
                setting.name: replace(setting, hint=setting.hint | None, default=None, null=metadata["null"])
                for section in metadata["partial"]
                for setting in _settings_in(section, None, place)
            }
            yield from optional.values()
        elif "inline" in metadata:
            yield from _settings_in(hints[entry.name], None, place)
        elif metadata.get("is_setting", "other_keys" not in metadata):
            default = entry.default if entry.default_factory is MISSING else entry.default_factory()
            yield Setting(metadata.get("key", entry.name), hints[entry.name], default, cls, place)


def build_section(cls: type, values: Mapping[str, Any]) -> Any:
    """Return the dataclass of a section, made of values by key and of defaults."""
    hints = get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for entry in fields(cls):
        key = entry.metadata.get("key", entry.name)
        if "inline" in entry.metadata:
            arguments[entry.name] = build_section(hints[entry.name], values)
        elif hints[entry.name] is AlgorithmSettings:
            start = get_algorithm(values["name"]).settings
            own = {declared.name for declared in fields(start) if values.get(declared.name) is not None}
            arguments[entry.name] = replace(start, **{name: values[name] for name in own})
        elif "partial" in entry.metadata:
            names = [name for section in entry.metadata["partial"] for name in settings_of(section)]
            arguments[entry.name] = {name: values[name] for name in names if values.get(name) is not None}
        elif "other_keys" in entry.metadata:
            others = {name: item for name, item in values.items() if name not in settings_of(cls)}
            arguments[entry.name] = {name: item for name, item in others.items() if item is not None}
        elif key in values and entry.metadata.get("is_setting", True):
            arguments[entry.name] = values[key]
    return cls(**arguments)


def to_plain(value: Any) -> Any:
    """Return a config or a section as a mapping for YAML."""
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if not is_dataclass(value):
        return value
    kind: Any = type(value)
    algorithm: Any = type(value.settings) if isinstance(value, AlgorithmChoice) else None
    plain = {name: to_plain(_at(value, item.place)) for name, item in settings_of(kind, algorithm).items()}
    others = other_keys_of(kind)
    return plain if others is None else {**plain, **getattr(value, others)}


def other_keys_of(cls: type) -> str | None:
    """Return the name of the field for keys that a section does not declare; None if the section refuses them."""
    return next((entry.name for entry in fields(cls) if "other_keys" in entry.metadata), None)


def _at(section: Any, place: Sequence[str]) -> Any:
    """Return the value at a `Setting.place`."""
    for name in place:
        section = section.get(name) if isinstance(section, Mapping) else getattr(section, name)
    return section


@cache
def all_settings(cls: type = Config, prefix: str = "") -> Mapping[str, Setting]:
    """Return all settings below a section, by dotted path."""
    found: dict[str, Setting] = {}
    for name, setting in settings_of(cls).items():
        found[prefix + name] = setting
        if setting.section is not None:
            found |= all_settings(setting.section, f"{prefix}{name}.")
    return found


def value_at(plain: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of a result of `to_plain`; None if there is none."""
    value: Any = plain
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def with_value(section: Any, path: str, value: Any) -> Any:
    """Return a config or a section with another value at a dotted path."""
    key, _, rest = path.partition(".")
    if isinstance(section, Mapping):
        return {**section, key: value}
    kind: Any = type(section)
    if key not in settings_of(kind):
        name = other_keys_of(kind)
        assert name is not None
        return replace(section, **{name: {**getattr(section, name), key: value}})
    place = settings_of(kind)[key].place
    changed = with_value(_at(section, place), rest, value) if rest else value
    for depth in reversed(range(len(place))):
        changed = replace(_at(section, place[:depth]), **{place[depth]: changed})
    return changed


def refuse(config: Config, path: str, rule: str, fix: str, value: Any = _GIVEN) -> str:
    """Return the error message for a setting, with its value (or `value`) and its place."""
    if value is _GIVEN:
        value = value_at(to_plain(config), path)
    return describe_refusal(path, value, rule, fix, config.origins.get(path, ""))


@cache
def _docs_in(cls: type) -> dict[str, str]:
    """Return the docstrings of fields, read from the source because Python does not keep them."""
    docs = {}
    for base in reversed(cls.__mro__[:-1]):
        tree = ast.parse(inspect.getsource(base))
        assert isinstance(tree.body[0], ast.ClassDef)
        for statement, following in pairwise(tree.body[0].body):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                docs[ast.unparse(statement.target)] = " ".join(str(ast.literal_eval(following.value)).split())
    return docs
