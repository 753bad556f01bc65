"""One ``--set a.b=c`` from the command line."""

from __future__ import annotations

from vectorlm.config.problem import describe_refusal, describe_unknown
from vectorlm.config.schema import ALIASES, Config
from vectorlm.config.setting import settings_of
from vectorlm.config.source import Entry, parse_yaml
from vectorlm.errors import ConfigError


def apply_override(tree: Entry, text: str) -> None:
    """Set one value in the tree of a config file, replacing what the file says.

    Args:
        tree: the file's settings, with every alias already moved to its own place.
        text: ``a.b=c``; `c` is read as YAML.

    Raises:
        ConfigError: the text has no ``=``, the setting does not exist or the value is not YAML.
    """
    origin = f"--set {text}"
    name, equals, written = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{origin!r} must name a setting and its value. Write --set name=value.")
    parts = canonical_path(name).split(".")
    _require_known(parts, origin)
    entry = tree
    for depth, part in enumerate(parts[:-1], start=1):
        child = entry.value.get(part)
        if child is None or child.value is None:
            child = entry.value[part] = Entry({}, origin)
        elif not isinstance(child.value, dict):
            path = ".".join(parts[:depth])
            raise ConfigError(describe_refusal(path, child.plain(), "must be a mapping", "", child.origin))
        entry = child
    value = parse_yaml(written, lambda line: origin)
    entry.value[parts[-1]] = value


def canonical_path(path: str) -> str:
    """Return the place of a setting that was named by an alias, or by a name below one."""
    for alias, place in ALIASES.items():
        if path == alias or path.startswith(alias + "."):
            return place + path.removeprefix(alias)
    return path


def _require_known(parts: list[str], origin: str) -> None:
    section: type = Config
    for depth, part in enumerate(parts):
        prefix = "".join(f"{parent}." for parent in parts[:depth])
        if part not in settings_of(section):
            raise ConfigError(describe_unknown(section, prefix, part, origin))
        setting = settings_of(section)[part]
        if setting.section is None:
            if depth + 1 < len(parts) and not setting.is_mapping:
                raise ConfigError(
                    f"'{prefix}{part}' is a single value and has no settings of its own ({origin}). "
                    f"Write --set {prefix}{part}=..."
                )
            return
        section = setting.section
