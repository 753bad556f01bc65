"""Import user code by names like ``file.py:NAME`` or ``package.module:NAME``.

A run that was started from Python stores its functions in ``functions.pkl``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle

from vectorlm.errors import ConfigError
from vectorlm.settings import nearest

PACKAGE = str(Path(__file__).parent)
LIBRARIES = (PACKAGE, "<", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Prefixes of files that are not user code; code without a file has a name in brackets."""


def is_plugin(name: str) -> bool:
    """Return whether `name` has the form ``WHERE:NAME``."""
    where, colon, what = name.rpartition(":")
    return bool(colon and where) and what.isidentifier()


def load_plugin(name: str) -> Any:
    """Import a file or module and return one of its attributes.

    Raises:
        ConfigError: The file, module or attribute does not exist, or its import raises or exits.
    """
    where, _, what = name.rpartition(":")
    load = _load_file if where.endswith(".py") else _load_pickle if where.endswith(".pkl") else _load_module
    try:
        module = load(where, name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name!r} cannot be imported: {raised_at(error)}. Correct {where}.") from error
    if not hasattr(module, what):
        raise ConfigError(
            f"{name!r} does not exist: {where} has no {what!r}. {nearest(what, vars(module))}".rstrip()
        )
    return getattr(module, what)


def raised_at(error: BaseException) -> str:
    """Return the type, text, file and line of an error raised by user code."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(PACKAGE)
    ]
    # Prefer the user's line to a library's: wandb replaces sys.exit, for example.
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    # The text of a SyntaxError names them.
    places = [] if isinstance(error, SyntaxError) else (own or frames)[-1:]
    place = "".join(f" ({frame.filename}:{frame.lineno})" for frame in places)
    return f"{type(error).__name__}: {text_of(error)}{place}"


def text_of(value: Any) -> str:
    """Return a value of user code as text, also if its `__str__` raises."""
    try:
        return str(value)
    except Exception as error:
        return f"(its text raised {type(error).__name__})"


def _load_pickle(where: str, name: str) -> Any:
    if not Path(where).is_file():
        raise ConfigError(f"{name!r} does not exist: {where} is not a file.")
    return SimpleNamespace(**cloudpickle.loads(Path(where).read_bytes()))


def _load_file(where: str, name: str) -> Any:
    path = Path(where).expanduser()
    if not path.is_file():
        raise ConfigError(f"{name!r} does not exist: {path} is not a file.")
    # No dots, which pickle takes for packages: a process pool in user code runs functions of the file.
    digest = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=8).hexdigest()
    key = f"vectorlm_plugin_{digest}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # As for a script, so that the file can import its neighbours; installed packages come first.
        if (folder := str(path.resolve().parent)) not in sys.path:
            sys.path.append(folder)
        _require_own_neighbours(path.resolve())
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
        # Other processes cannot import this name, and all ranks get configs with the settings of the user's algorithm.
        cloudpickle.register_pickle_by_value(module)
    return sys.modules[key]


def _require_own_neighbours(path: Path) -> None:
    """Raise ConfigError if `path`, or a neighbour that it imports, gets a user module from another folder.

    Python keeps one module per name. Installed packages come before neighbours and are not checked.
    """
    files = [path]
    for file in files:  # It grows.
        for name in sorted(_imported(file)):
            beside = (path.parent / f"{name}.py", path.parent / name / "__init__.py")
            own = [path.resolve() for path in beside if path.is_file()]
            taken = getattr(sys.modules.get(name), "__file__", None)
            if own and taken is None and (spec := importlib.util.find_spec(name)) and spec.has_location:
                taken = spec.origin
            if not own or taken is None or taken.startswith(LIBRARIES):
                continue
            if (found := Path(taken).resolve()) not in own:
                raise ConfigError(
                    f"{file} imports {name!r} and would get {found} in place of {own[0]}: Python keeps one module "
                    "per name. Rename one of the two."
                )
            if found not in files:
                files.append(found)


def _imported(file: Path) -> set[str]:
    """Return the top-level names of absolute imports in a file."""
    nodes = list(ast.walk(ast.parse(file.read_bytes(), str(file))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def _load_module(where: str, name: str) -> Any:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        # The module may exist and import a missing one.
        if error.name is not None and not f"{where}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{name!r} does not exist: no module named {where!r}.") from error
