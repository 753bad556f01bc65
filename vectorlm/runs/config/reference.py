"""Render docs/config.md, the tables of all settings, from the schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, asdict, is_dataclass
from typing import Any

from vectorlm.algorithms.registry import SETTINGS
from vectorlm.runs.config.schema import ALIASES, AlgorithmChoice, Config
from vectorlm.runs.config.setting import Setting, settings_of
from vectorlm.runs.config.value import describe, show

_INTRODUCTION = """# Configuration

One YAML file describes a run. Set a key in the file, or override it on the command line with `--set`. You can
repeat `--set`; it reads its value as YAML:

    vectorlm check my.yaml --world_size 2 --set train_parameters.epochs=3 --set evaluation=null

`vectorlm check` checks the file against the number of ranks and the files on disk. It prints every setting and a
summary of the run. Unknown keys, wrong types and impossible values are errors; the message has the line, the rule and
a fix. A setting without an effect is an error too, unless the file turns its feature off.

- Relative paths start at the working directory.
- `1e-5` is a number.
- `configs/config.yaml` has every fine-tuning setting with a comment. Commands use it if you pass no file.
- For files from VectorLM, see [from_vectorlm.md](from_vectorlm.md).

`python -m vectorlm.runs.config.reference` generates this page from the settings dataclasses (nested in
`vectorlm/runs/config/schema.py`).
"""


def render_reference() -> str:
    """Return docs/config.md: one table per section, one row per key."""
    aliases = [f"`{alias}` is another place for `{place}`" for alias, place in ALIASES.items()]
    ending = "Accepted from existing files: " + "; ".join(aliases) + ".\n"
    tables = [_table(section, places) for section, places in _places(Config, "").items()]
    return "\n".join([_INTRODUCTION, *tables, ending])


def _places(section: type, place: str) -> dict[type, list[str]]:
    """Return the sections with all their places in a config."""
    found = {section: [place]}
    for name, setting in settings_of(section).items():
        path = f"{place}.{name}" if place else name
        for child, child_path in ((setting.section, path), (setting.item_section, f"{path}.NAME")):
            for kind, places in ({} if child is None else _places(child, child_path)).items():
                found.setdefault(kind, []).extend(places)
    return found


def _table(section: type, places: Sequence[str]) -> str:
    title = f"## `{places[0]}`" if places[0] else "## Top level"
    also = f"\n\nAlso: {', '.join(f'`{place}`' for place in places[1:])}." if places[1:] else ""
    if section is AlgorithmChoice:
        head, rows = (
            "| Key | Must be | Default by algorithm | Meaning |",
            map(_row_of_algorithms, *zip(*settings_of(section).items(), strict=True)),
        )
    else:
        head, rows = "| Key | Must be | Default | Meaning |", map(_row, settings_of(section).values())
    return f"{title}\n\n{section.__doc__}{also}\n\n{head}\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _row(setting: Setting) -> str:
    return _cells(setting.name, describe(setting.hint), _default(setting.default), setting.doc)


def _row_of_algorithms(name: str, setting: Setting) -> str:
    defaults: dict[Any, list[str]] = {}
    for algorithm, start in SETTINGS.items():
        if name in asdict(start):
            defaults.setdefault(getattr(start, name), []).append(algorithm)
    if not defaults:
        return _row(setting)
    doc = setting.doc.replace(f"; null means {setting.null}", "")
    listed = (f"`{show(value)}`: {', '.join(names)}" for value, names in defaults.items())
    return _cells(name, describe(setting.hint).removesuffix(", or null"), "; ".join(listed), doc)


def _cells(name: str, *others: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{name}`", *others)) + " |"


def _default(default: Any) -> str:
    if is_dataclass(default):
        return "its own defaults"
    return "required" if default is MISSING else f"`{show(default)}`"


if __name__ == "__main__":
    print(render_reference(), end="")
