"""A YAML file read into the schema, strictly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

from vectorlm.config.check import check_consistency
from vectorlm.config.override import apply_override
from vectorlm.config.problem import describe_missing, describe_unknown, raise_problems
from vectorlm.config.schema import ALIASES, Config
from vectorlm.config.setting import Setting, settings_of
from vectorlm.config.source import Entry, parse_yaml
from vectorlm.config.value import convert
from vectorlm.errors import ConfigError


def load_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read a config file; touches no device and imports neither torch nor vLLM.

    Args:
        path: the YAML file.
        overrides: settings that win over the file's, each ``a.b=c`` with `c` read as YAML; the last one wins.

    Returns:
        The resolved config, with every default filled in.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown, missing, of the wrong type or
            impossible; lists every such setting with its place and a fix.
    """
    tree = _read_file(fspath(path))
    _resolve_aliases(tree)
    for override in overrides:
        apply_override(tree, override)
    problems: list[str] = []
    config = _read_section(Config, tree, "", problems)
    raise_problems(problems)
    config = replace(config, origins=_origins(tree))
    check_consistency(config)
    return config


def _read_file(path: str) -> Entry:
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path!r}: {error.strerror}.") from error
    tree = parse_yaml(text, lambda line: f"{path}:{line}")
    if tree.value is None:
        tree.value = {}
    if not isinstance(tree.value, dict):
        kind = type(tree.value).__name__
        raise ConfigError(f"a config file must hold `key: value` lines, not a {kind} ({path}).")
    return tree


def _resolve_aliases(tree: Entry) -> None:
    """Move each setting that stands in an older place to its own."""
    for alias, place in ALIASES.items():
        source = _section_of(tree, alias)
        entry = source.pop(alias.rpartition(".")[2], None)
        if entry is None or entry.value is None:
            continue
        section_name, _, key = place.rpartition(".")
        section = tree.value.setdefault(section_name, Entry({}, entry.origin))
        if not isinstance(section.value, dict):
            continue  # reported as a wrong section later
        other = section.value.get(key)
        if other is not None and other.value is not None:
            raise ConfigError(
                f"'{alias}' ({entry.origin}) and '{place}' ({other.origin}) are the same setting. "
                "Remove one of the two."
            )
        section.value[key] = entry


def _section_of(tree: Entry, path: str) -> dict[str, Entry]:
    section_name = path.rpartition(".")[0]
    section = tree.value.get(section_name) if section_name else tree
    return section.value if section is not None and isinstance(section.value, dict) else {}


def _read_section(section: type, entry: Entry, prefix: str, problems: list[str]) -> Any:
    """Return the section as its dataclass, or None after adding to `problems`."""
    known, values, num_before = settings_of(section), {}, len(problems)
    for key, child in entry.value.items():
        if key in known:
            values[known[key].field_name] = _read_setting(known[key], child, prefix + key, problems)
        else:
            problems.append(describe_unknown(section, prefix, key, child.origin))
    missing = [
        name for name, setting in known.items() if setting.is_required and setting.field_name not in values
    ]
    if missing:
        problems.append(describe_missing(section, prefix, missing, entry.origin))
    return section(**values) if len(problems) == num_before else None


def _read_setting(setting: Setting, entry: Entry, path: str, problems: list[str]) -> Any:
    if setting.section is not None and isinstance(entry.value, dict):
        return _read_section(setting.section, entry, f"{path}.", problems)
    try:
        return convert(setting.hint, entry, path)
    except ConfigError as error:
        problems.append(str(error))
        return None


def _origins(tree: Entry, prefix: str = "") -> dict[str, str]:
    origins = {}
    for key, entry in tree.value.items():
        origins[f"{prefix}{key}"] = entry.origin
        if isinstance(entry.value, dict):
            origins |= _origins(entry, f"{prefix}{key}.")
    return origins
