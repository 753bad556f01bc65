"""Read a config file with overrides into the schema, and write it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, is_dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import yaml
from pydantic import PydanticSchemaGenerationError

from vectorlm.algorithms.registry import SETTINGS, get_algorithm
from vectorlm.errors import ConfigError
from vectorlm.runs.config.schema import ALIASES, OLD_SECTION, AlgorithmChoice, Config, old_names
from vectorlm.runs.config.setting import (
    Setting,
    all_settings,
    build_section,
    other_keys_of,
    settings_of,
    to_plain,
)
from vectorlm.runs.config.value import (
    FOREIGN,
    VERL_SECTIONS,
    Dumper,
    Entry,
    convert,
    describe_refusal,
    find_foreign,
    parse_yaml,
    raise_problems,
)
from vectorlm.settings import closest
from vectorlm.train.optimizers import accepted
from vectorlm.train.settings import OptimizerSettings

DEFAULT_PATH = "configs/config.yaml"
"""The default config file of commands."""
ARGUMENT = "an argument"
"""The place of a setting that is a Python argument."""


def load_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read a config file; touches no device and imports neither torch nor vLLM.

    Your own algorithm (``rl.algorithm: file.py:NAME``) is imported, because it declares settings.

    Args:
        path: The YAML file.
        overrides: Settings that replace the file's: ``a.b=c`` with `c` in YAML; the last one wins.

    Returns:
        The resolved config, with every default filled in.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown, missing or of the wrong type; lists every such
            setting with its place and a fix.
    """
    tree = _read_file(fspath(path))
    _resolve_aliases(tree)
    for override in overrides:
        _apply_override(tree, override)
    return _read_tree(tree)


def config_from_keywords(settings: Mapping[str, Any], section: str) -> Config:
    """Read keyword arguments like a config file.

    Args:
        settings: Sections, and settings by the last part of their path. If several settings have this name, the one
            nearest the top is set; settings in ``rl`` count only if `section` is ``rl``.
        section: The section for names that neither the schema nor the algorithm has.

    Raises:
        ConfigError: As `load_config`.
    """
    tree: dict[str, Any] = {}
    settings = {name: _algorithm_in_full(name, value) for name, value in settings.items()}
    # Other kinds of training have settings of the same name: `beta` of an algorithm and of a preference loss.
    others = ("preference", "reward_model") if section == "rl" else ("rl",)
    known = [path for path in all_settings() if path.split(".")[0] not in others]
    known.sort(key=lambda path: (path.count("."), not path.startswith((section, "train_parameters"))))
    known += [f"rl.algorithm.{name}" for name in _own_settings(settings)]
    # Single settings override sections.
    for name, value in sorted(settings.items(), key=lambda item: not isinstance(item[1], Mapping)):
        paths = (path for path in known if path.rpartition(".")[2] == name)
        *parents, last = next(paths, f"{section}.{name}").split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = _merged(place.get(last), value)
    entry = _entry_of(tree, ARGUMENT)
    _resolve_aliases(entry)
    return _read_tree(entry)


def _merged(first: Any, second: Any) -> Any:
    """Return two sections as a new one, or the `second` value."""
    if not isinstance(second, Mapping):
        return second
    # The caller keeps its dictionaries: later settings are written into copies.
    first = first if isinstance(first, Mapping) else {}
    return {**first, **{name: _merged(first.get(name), value) for name, value in second.items()}}


def _algorithm_in_full(name: str, value: Any) -> Any:
    """Change the name of an algorithm into a section."""
    if name == "rl" and isinstance(value, Mapping):
        return {key: _algorithm_in_full(key, item) for key, item in value.items()}
    return {"name": value} if name == "algorithm" and isinstance(value, str) else value


def _own_settings(settings: Mapping[str, Any]) -> Iterable[str]:
    """Return the names of the settings of the user's own algorithm."""
    for section in (settings, settings.get("rl")):
        algorithm = section.get("algorithm") if isinstance(section, Mapping) else None
        if isinstance(algorithm, Mapping) and isinstance(name := algorithm.get("name"), str):
            with suppress(ConfigError):  # reported later
                return asdict(get_algorithm(name).settings)
    return ()


def _entry_of(value: Any, origin: str) -> Entry:
    if isinstance(value, Mapping):
        return Entry({key: _entry_of(child, origin) for key, child in value.items()}, origin)
    if isinstance(value, list | tuple):
        return Entry([_entry_of(item, origin) for item in value], origin)
    return Entry(value, origin)


def _read_tree(tree: Entry) -> Config:
    problems: list[str] = []
    config = _read_section(Config, tree, "", problems)
    raise_problems(problems)
    return replace(config, origins=_origins(tree))


def config_text(config: Config) -> str:
    """Return every setting as YAML, defaults included; `load_config` reads an equal config back."""
    return str(yaml.dump(to_plain(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110))


def save_config(config: Config, path: str | PathLike[str]) -> None:
    """Write `config_text` to a file."""
    Path(path).write_text(config_text(config), encoding="utf-8")


def _read_file(path: str) -> Entry:
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        hint = " It is the default: name the file to read." if path == DEFAULT_PATH else ""
        hint = f" To change a setting, write --set {path}." if "=" in path else hint
        raise ConfigError(f"cannot read the config file {path!r}: {error.strerror}.{hint}") from error
    if path.endswith((".py", ".ipynb")):
        raise ConfigError(
            f"{path!r} is no config file. Run a script with python, and name a file in YAML here."
        )
    tree = parse_yaml(text, lambda line: f"{path}:{line}")
    if tree.value is None:
        tree.value = {}
    if not isinstance(tree.value, dict):
        kind = type(tree.value).__name__
        raise ConfigError(f"a config file must hold `key: value` lines, not a {kind} ({path}).")
    return tree


def _resolve_aliases(tree: Entry) -> None:
    """Move settings from their older places to the current places."""
    for alias in ALIASES:
        parents, _, key = alias.rpartition(".")
        entry = _section_at(tree, parents).pop(key, None)
        if entry is not None and entry.value is not None:
            _place(tree, alias, entry)


def _section_at(tree: Entry, path: str) -> dict[str, Entry]:
    """Return the keys of a section; an empty dictionary if there is none."""
    for name in filter(None, path.split(".")):
        tree = (tree.value.get(name) if isinstance(tree.value, dict) else None) or Entry({}, "")
    return tree.value if isinstance(tree.value, dict) else {}


def _place(tree: Entry, alias: str, entry: Entry, *, replaces: bool = False) -> None:
    """Move a setting from its older place `alias` to its current place.

    Raises:
        ConfigError: The current place has a value already, and `replaces` is false.
    """
    place = _canonical_path(alias)
    if "." not in place and isinstance(entry.value, dict):  # a section
        for name, child in entry.value.items():
            _place(tree, f"{alias}.{name}", child, replaces=replaces)
        return
    *sections, key = place.split(".")
    for name in sections:
        child = tree.value.get(name)
        if child is None or child.value is None:
            child = tree.value[name] = Entry({}, entry.origin)
        elif not isinstance(child.value, dict):
            return  # reported as a wrong section later
        tree = child
    other = tree.value.get(key)
    further = alias.endswith(".further_rewards")
    if other is not None and other.value is not None and not (replaces or further):
        raise ConfigError(
            f"'{alias}' ({entry.origin}) and '{place}' ({other.origin}) are the same setting. "
            "Remove one of the two."
        )
    tree.value[key] = _with_further(entry, other) if further else entry


def _with_further(further: Entry, first: Entry | None) -> Entry:
    """Return VectorLM's rewards as weights; only the first has a weight above 0, because it alone is `eval/reward`."""
    if not isinstance(further.value, list):
        return further
    given = [] if first is None else first.plain() or []
    names = [*([given] if isinstance(given, str) else given)][:1] + [item.value for item in further.value]
    return Entry(
        {name: Entry(float(not place), further.origin) for place, name in enumerate(names)}, further.origin
    )


def _read_section(section: type, entry: Entry, prefix: str, problems: list[str]) -> Any:
    """Return the section as its dataclass; if it has problems, add them to `problems` and return None."""
    num_before = len(problems)
    values: dict[str, Any] = {}
    beside: dict[str, Any] = {}
    own = _arguments_of_optimizer(entry, problems) if section is OptimizerSettings else set[str]()
    known = settings_of(section)
    if section is AlgorithmChoice:
        known = {**known, **_settings_of_algorithm(entry, prefix, known, problems)}
    for key, child in entry.value.items():
        if key in known:
            values[key] = _read_setting(known[key], child, prefix + key, problems)
        elif key in own:
            beside[key] = child.plain()
        elif other_keys_of(section) is not None:
            values[key] = child.plain()
        else:
            problems += _describe_unknown(prefix, str(key), child, [*known, *sorted(own)])
    if beside:
        values["arguments"] = {**(values.get("arguments") or {}), **beside}
    missing = [name for name, setting in known.items() if setting.is_required and name not in values]
    if missing:
        problems.append(_describe_missing(section, prefix, missing, entry.origin))
    return build_section(section, values) if len(problems) == num_before else None


def _arguments_of_optimizer(entry: Entry, problems: list[str]) -> Set[str]:
    """Return the arguments of the section's optimizer that are not settings of all optimizers."""
    name = entry.value.get("name")
    if name is None or not isinstance(name.value, str):
        return set()
    try:
        return accepted(name.value) - settings_of(OptimizerSettings).keys()
    except ConfigError as error:
        problems.append(f"{error} ({name.origin})")
        return set()


def _settings_of_algorithm(
    entry: Entry, prefix: str, known: Mapping[str, Setting], problems: list[str]
) -> dict[str, Setting]:
    """Return the settings of the section's algorithm; refuse settings of other algorithms."""
    algorithm = entry.value.get("name")
    if algorithm is None or not isinstance(algorithm.value, str):
        return {}
    try:
        start = get_algorithm(algorithm.value).settings
    except ConfigError as error:
        problems.append(f"{error} ({algorithm.origin})")
        return {}
    kind: type = type(start)
    own = settings_of(kind)
    given = {key for key, child in entry.value.items() if child.value is not None}
    for key in [] if algorithm.value in SETTINGS else own.keys() - given:
        # Types that YAML does not have, such as tensors, are not checked.
        with suppress(PydanticSchemaGenerationError):
            default = Entry(getattr(start, own[key].place[-1]), f"the default in {algorithm.value}")
            _read_setting(own[key], default, prefix + key, problems)
    # The schema has the settings of all algorithms too; there they may be null.
    for key in [key for key in own if key in known and not known[key].null]:
        problems.append(
            f"{algorithm.value} cannot declare a setting '{key}'. Rename it. ({algorithm.origin})"
        )
    for key, child in list(entry.value.items()):
        owners = [name for name, start in SETTINGS.items() if key in asdict(start)]
        if owners and key not in own and child.value is not None:
            rule = f"cannot be set: {algorithm.value} has no such setting ({', '.join(owners)} have it)"
            fix = "Did you mean rl.kl_coef?" if key == "beta" else "Leave it out."
            problems.append(describe_refusal(f"{prefix}{key}", child.plain(), rule, fix, child.origin))
            del entry.value[key]
    return {key: replace(setting, hint=setting.hint | None) for key, setting in own.items()}


def _read_setting(setting: Setting, entry: Entry, path: str, problems: list[str]) -> Any:
    if setting.section is not None and entry.value is None and is_dataclass(setting.default):
        return setting.default
    if setting.section is not None and isinstance(_in_full(entry, path).value, dict):
        return _read_section(setting.section, entry, f"{path}.", problems)
    if (item := setting.item_section) is not None and isinstance(entry.value, dict):
        return {
            name: _read_setting(replace(setting, hint=item), child, f"{path}.{name}", problems)
            for name, child in entry.value.items()
        }
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


def _apply_override(tree: Entry, text: str) -> None:
    """Set one value, `a.b=c` with `c` in YAML, in a tree without aliases."""
    origin = f"--set {text}"
    name, equals, written = text.partition("=")
    name = name.lstrip("+")  # Hydra's prefix for an added setting
    if not equals or not name:
        raise ConfigError(f"{origin!r} must name a setting and its value. Write --set name=value.")
    value = parse_yaml(written, lambda line: origin)
    if name == OLD_SECTION and value.value is None:  # no evaluations
        name = "evaluation"
    elif name in ALIASES:
        _place(tree, name, value, replaces=True)
        return
    parts = _canonical_path(name).split(".")
    entry = tree
    for depth, part in enumerate(parts[:-1], start=1):
        child = entry.value.get(part)
        if child is None or child.value is None:
            child = entry.value[part] = Entry({}, origin)
        elif not isinstance(_in_full(child, path := ".".join(parts[:depth])).value, dict):
            raise ConfigError(describe_refusal(path, child.plain(), "must be a mapping", "", child.origin))
        entry = child
    entry.value[parts[-1]] = value


def _in_full(entry: Entry, path: str) -> Entry:
    """Change the name of an algorithm into a section."""
    if path == "rl.algorithm" and isinstance(entry.value, str):
        entry.value = {"name": Entry(entry.value, entry.origin)}
    return entry


def _canonical_path(path: str) -> str:
    """Return the path of a setting, with aliases replaced."""
    for alias in sorted(ALIASES, key=len, reverse=True):
        if path == alias or path.startswith(alias + "."):
            return ALIASES[alias] + path.removeprefix(alias)
    return path


def _describe_unknown(prefix: str, key: str, entry: Entry, known: Sequence[str]) -> list[str]:
    """Return the error messages for an unknown key, with its counterpart or the most similar name.

    A section of verl gets a message for each of its settings.
    """
    origin, path = entry.origin, f"{prefix}{key}"
    if not prefix and key in VERL_SECTIONS and isinstance(entry.value, dict):
        return _describe_verl(key, entry)
    if (foreign := find_foreign(path)) is not None:
        return [f"unknown setting '{path}' ({origin}). {foreign.fix}"]
    # The key may belong to another section.
    candidates = [place for place in all_settings() if place.rpartition(".")[2] == key]
    # Old names have no field, but people misspell them too.
    if (near := closest(key, [*known, *old_names(prefix)])) is not None:
        candidates.append(prefix + near)
    if candidates:
        fix = f"Did you mean '{candidates[0]}'?"
    else:
        place = f"'{prefix.removesuffix('.')}'" if prefix else "the top level"
        few = f"The settings of {place} are: {', '.join(known)}."
        fix = few if len(known) <= 12 else "No setting is like it; docs/config.md lists them all."
    return [f"unknown setting '{path}' ({origin}). {fix}"]


def _describe_verl(section: str, entry: Entry) -> list[str]:
    """Return an error message per setting in a section of verl, and one for all settings without a counterpart."""
    messages, strange = [], []
    for path, leaf in _leaves(section, entry):
        places = [place for place in all_settings() if place.rpartition(".")[2] == path.rpartition(".")[2]]
        if (foreign := find_foreign(path)) is not None:
            messages.append(f"unknown setting '{path}' ({leaf.origin}). {foreign.fix}")
        elif len(places) == 1:
            messages.append(f"unknown setting '{path}' ({leaf.origin}). Did you mean '{places[0]}'?")
        else:
            strange.append(path)
    if strange:
        names = ", ".join(map(repr, strange))
        messages.append(
            f"no setting is like {names} ({entry.origin}). Leave them out; docs/from_verl.md shows a whole config."
        )
    return messages


def _leaves(path: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
    """Yield the settings in a section of verl by dotted path; a section that has a counterpart counts as one."""
    section = path.rpartition(".")[2]
    if isinstance(entry.value, dict) and (
        find_foreign(path) is None or any(f"{section}.{name}" in FOREIGN for name in entry.value)
    ):
        for name, child in entry.value.items():
            yield from _leaves(f"{path}.{name}", child)
    else:
        yield path, entry


def _describe_missing(section: type, prefix: str, names: Sequence[str], origin: str) -> str:
    """Return the error message for missing keys, with their meaning."""
    settings = settings_of(section)
    lacking = [f"'{prefix}{name}' ({settings[name].doc.rstrip('.')})" for name in names]
    noun = "setting" if len(names) == 1 else "settings"
    plain = [f"--set {prefix}{name}=VALUE" for name in names if settings[name].section is None]
    fix = "Add it" if len(names) == 1 else "Add them"
    if plain and origin != ARGUMENT:
        fix += f", or give {' '.join(plain)}"
    return f"missing {noun} {', '.join(lacking)} ({origin}). {fix}."
