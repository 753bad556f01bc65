"""One key of the schema: its type, default and explanation, read off the dataclasses."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from vectorlm.config.schema import Config
from vectorlm.config.value import describe_refusal
from vectorlm.hyperparameters import SETTINGS, AlgorithmSettings
from vectorlm.settings import ReadIf

_GIVEN: Any = object()


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

    @property
    def is_required(self) -> bool:
        """Whether the key must be given."""
        return self.default is MISSING

    @property
    def section(self) -> type | None:
        """The dataclass behind the key, or None where it holds a plain value."""
        kinds = (self.hint, *get_args(self.hint))
        return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)

    @property
    def read_if(self) -> tuple[ReadIf, ...]:
        """What must hold for the setting to have an effect."""
        return tuple(note for kind in (self.hint, *get_args(self.hint)) for note in _notes(kind))

    @property
    def is_mapping(self) -> bool:
        """Whether the key holds a mapping whose own keys are free."""
        return any(get_origin(kind) is Mapping for kind in (self.hint, *get_args(self.hint)))


@cache
def settings_of(cls: type) -> dict[str, Setting]:
    """Return the settings of a section, by key, in the order of the schema."""
    found = list(_settings_in(cls))
    settings = {setting.name: setting for setting in found}
    assert len(settings) == len(found), f"{cls.__name__} declares a key twice"
    return settings


def _settings_in(cls: type) -> Iterator[Setting]:
    hints, docs = get_type_hints(cls, include_extras=True), dict[str, str]()
    for each in reversed(cls.__mro__[:-1]):
        docs |= _field_docs(each)
    for entry in _fields_of(cls):
        if "inline" in entry.metadata:
            yield from _settings_in(hints[entry.name])
        elif (section := entry.metadata.get("partial")) is not None:
            yield from _optional(settings_of(section), entry.metadata["null"])
        elif "of_algorithm" in entry.metadata:
            kinds: list[type] = [type(start) for start in SETTINGS.values()]
            of_rows = {name: each for kind in kinds for name, each in settings_of(kind).items()}
            yield from _optional(of_rows, "the algorithm's own value")
        else:
            default = entry.default if entry.default_factory is MISSING else entry.default_factory()
            yield Setting(_key_of(entry), hints[entry.name], default, docs.get(entry.name, ""))


def _optional(settings: Mapping[str, Setting], null: str) -> Iterator[Setting]:
    for each in settings.values():
        doc = f"{each.doc.rstrip('.')}; null means {null}."
        yield Setting(each.name, each.hint | None, None, doc)


def build_section(cls: type, values: Mapping[str, Any]) -> Any:
    """Make the dataclass of a section from its values by key; a key that is left out has its default."""
    hints, arguments = get_type_hints(cls), {}
    for entry in _fields_of(cls):
        if "inline" in entry.metadata:
            arguments[entry.name] = build_section(hints[entry.name], values)
        elif (section := entry.metadata.get("partial")) is not None:
            given = {key: values.get(key) for key in settings_of(section)}
            arguments[entry.name] = {key: value for key, value in given.items() if value is not None}
        elif "of_algorithm" in entry.metadata:
            start = start_of(values["algorithm"])
            given = {each.name: values.get(each.name) for each in fields(start)}
            arguments[entry.name] = replace(
                start, **{key: value for key, value in given.items() if value is not None}
            )
        elif _key_of(entry) in values:
            arguments[entry.name] = values[_key_of(entry)]
    return cls(**arguments)


def start_of(algorithm: str) -> AlgorithmSettings:
    """Return where an algorithm starts; only one of the user's imports torch.

    Raises:
        ConfigError: There is no such algorithm.
    """
    if algorithm in SETTINGS:
        return SETTINGS[algorithm]
    from vectorlm.algorithms.registry import get_algorithm

    return get_algorithm(algorithm).settings


def to_plain(value: Any) -> Any:
    """Return a config, or a section of one, as the mapping that YAML holds."""
    if not is_dataclass(value):
        return value
    plain: dict[str, Any] = {}
    for entry in _fields_of(type(value)):
        item = getattr(value, entry.name)
        if "inline" in entry.metadata or "of_algorithm" in entry.metadata:
            plain |= to_plain(item)
        elif (section := entry.metadata.get("partial")) is not None:
            plain |= {key: item.get(key) for key in settings_of(section)}
        else:
            plain[_key_of(entry)] = to_plain(item)
    return plain


@cache
def all_settings(cls: type = Config, prefix: str = "") -> Mapping[str, Setting]:
    """Return every setting below a section, by its dotted path."""
    found: dict[str, Setting] = {}
    for name, setting in settings_of(cls).items():
        found[prefix + name] = setting
        if setting.section is not None:
            found |= all_settings(setting.section, f"{prefix}{name}.")
    return found


def value_at(plain: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of what `to_plain` returned; None where there is none."""
    value: Any = plain
    for key in path.split("."):
        value = None if value is None else value.get(key)
    return value


def refuse(config: Config, path: str, rule: str, fix: str, value: Any = _GIVEN) -> str:
    """Say that a setting breaks a rule, with its value in the config (or `value`) and the place that set it."""
    if value is _GIVEN:
        value = value_at(to_plain(config), path)
    return describe_refusal(path, value, rule, fix, config.origins.get(path, ""))


def _notes(hint: Any) -> Iterator[ReadIf]:
    if get_origin(hint) is Annotated:
        yield from (note for note in get_args(hint)[1:] if isinstance(note, ReadIf))


def _fields_of(cls: type) -> list[Field[Any]]:
    return [entry for entry in fields(cls) if entry.metadata.get("is_setting", True)]


def _key_of(entry: Field[Any]) -> str:
    """Return what YAML calls a field: its own name, but for Python's own words, like ``async``."""
    return entry.metadata.get("key", entry.name)


def _field_docs(cls: type) -> dict[str, str]:
    """Return the string literal under each field, which Python itself does not keep."""
    tree = ast.parse(inspect.getsource(cls))
    assert isinstance(tree.body[0], ast.ClassDef)
    body = tree.body[0].body
    docs = {}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(statement.target, ast.Name)
            docs[statement.target.id] = " ".join(str(ast.literal_eval(following.value)).split())
    return docs
