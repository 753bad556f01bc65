"""A name of the form ``file.py:NAME`` or ``package.module:NAME``, and the object that it points to."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from vectorlm.errors import ConfigError


def is_plugin(name: str) -> bool:
    """Return whether `name` is of that form."""
    where, colon, what = name.rpartition(":")
    return bool(colon and where) and what.isidentifier()


def load_plugin(name: str) -> Any:
    """Import a file or module and return one of its attributes.

    Raises:
        ConfigError: There is no such file, module or attribute. What the module itself raises passes through.
    """
    where, _, what = name.rpartition(":")
    module = _load_file(Path(where), name) if where.endswith(".py") else _load_module(where, name)
    if not hasattr(module, what):
        raise ConfigError(f"{name!r} does not exist: {where} has no {what!r}.")
    return getattr(module, what)


def _load_file(path: Path, name: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{name!r} does not exist: {path} is not a file.")
    key = f"vectorlm_plugin_{path.resolve()}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]


def _load_module(where: str, name: str) -> Any:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        # A module that it imports may be what is missing: that is its own error.
        if error.name is not None and not f"{where}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{name!r} does not exist: no module named {where!r}.") from error
