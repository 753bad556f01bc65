"""The table of all settings, rendered from the schema for docs/config.md."""

from __future__ import annotations

from dataclasses import MISSING, is_dataclass
from typing import Any

from vectorlm.runs.config.schema import ALIASES, Config
from vectorlm.runs.config.setting import Setting, settings_of
from vectorlm.runs.config.value import describe, show

_INTRODUCTION = """# Configuration

A run is described by one YAML file. Every key below may be given in the file or overridden on the command
line with `--set`, which may be repeated and reads its value as YAML:

    vectorlm check my.yaml --world_size 2 --set train_parameters.epochs=3 --set train_parameters.sampler=null

`vectorlm check` reads the file, checks it against the number of ranks and the files on disk, and prints what
the run would do. An unknown key, a wrong type or an impossible value is an error that names the line, the
rule and a fix; so is a setting that has no effect, unless the file itself turns off what it belongs to.
Relative paths start at the working directory. `1e-5` is a number.

[from_vectorlm.md](from_vectorlm.md) says what differs for files of VectorLM; `configs/config.yaml` has every
setting of fine-tuning with a comment, and is what the commands read without a file.

This page is made from the settings dataclasses (nested in `vectorlm/runs/config/schema.py`) by
`python -m vectorlm.runs.config.reference`.
"""


def render_reference() -> str:
    """Return docs/config.md: one table per section, one row per key."""
    aliases = [f"`{alias}` is another place for `{place}`" for alias, place in ALIASES.items()]
    ending = "Accepted from existing files: " + "; ".join(aliases) + ".\n"
    return "\n".join([_INTRODUCTION, *_section_tables(Config, ""), ending])


def _section_tables(section: type, prefix: str) -> list[str]:
    settings = settings_of(section)
    title = f"## `{prefix.removesuffix('.')}`" if prefix else "## Top level"
    head = "| Key | Must be | Default | Meaning |\n|---|---|---|---|"
    rows = "\n".join(_row(setting) for setting in settings.values())
    tables = [f"{title}\n\n{section.__doc__}\n\n{head}\n{rows}\n"]
    for name, setting in settings.items():
        if setting.section is not None:
            tables += _section_tables(setting.section, f"{prefix}{name}.")
        if setting.item_section is not None:
            tables += _section_tables(setting.item_section, f"{prefix}{name}.NAME.")
    return tables


def _row(setting: Setting) -> str:
    cells = [f"`{setting.name}`", describe(setting.hint), _default(setting.default), setting.doc]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(default: Any) -> str:
    if is_dataclass(default):
        return "its own defaults"
    return "required" if default is MISSING else f"`{show(default)}`"


if __name__ == "__main__":
    print(render_reference(), end="")
