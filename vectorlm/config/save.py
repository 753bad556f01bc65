"""A resolved config written back as YAML."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from vectorlm.config.schema import Config
from vectorlm.config.setting import key_of
from vectorlm.config.source import Dumper


def save_config(config: Config, path: str | PathLike[str]) -> None:
    """Write every setting, defaults included, so that `load_config` reads an equal config back."""
    text = yaml.dump(_plain(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    Path(path).write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        settings = [entry.name for entry in fields(value) if entry.metadata.get("is_setting", True)]
        return {key_of(name): _plain(getattr(value, name)) for name in settings}
    return value
