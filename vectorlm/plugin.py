"""Load the user's code by names such as ``file.py:NAME`` or ``package.module:NAME``.

A run that starts from Python pickles the given functions to ``functions.pkl``, with names ``functions.pkl:NAME``.
"""

from __future__ import annotations

import ast
import contextlib
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
"""Prefixes of files that are not the user's. Code without a file has a name in angle brackets."""


def is_plugin(name: str) -> bool:
    """Return whether `name` has the form ``file.py:NAME`` or ``package.module:NAME``."""
    where, colon, what = name.rpartition(":")
    return bool(colon and where) and what.isidentifier()


def file_of(name: str) -> str:
    """Return the file with the code of ``file.py:NAME`` or ``package.module:NAME``; any other name unchanged."""
    if not is_plugin(name):
        return name
    where = name.rpartition(":")[0]
    if where.endswith((".py", ".pkl")):
        return os.path.expanduser(where)
    # Finding a module imports its package, which may raise anything.
    with contextlib.suppress(Exception):
        if (spec := importlib.util.find_spec(where)) is not None and spec.origin is not None:
            return spec.origin
    return where


def load_plugin(name: str) -> Any:
    """Import a file or module and return one of its attributes.

    Raises:
        ConfigError: The file or the attribute does not exist, or importing it raises or exits.
    """
    where, _, what = name.rpartition(":")
    if not where:
        raise ConfigError(f"{name!r} must be file.py:NAME or module:NAME.")
    load = _load_file if where.endswith(".py") else _load_pickle if where.endswith(".pkl") else _load_module
    try:
        module = load(where, name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        fix = f"Correct {where}."
        if isinstance(error, ModuleNotFoundError) and where.startswith("vectorlm."):
            fix = f"Run `pip install {error.name}`."
        raise ConfigError(f"{name!r} cannot be imported: {raised_at(error)}. {fix}") from error
    if not hasattr(module, what):
        raise ConfigError(
            f"{name!r} does not exist: {where} has no {what!r}. {nearest(what, vars(module))}".rstrip()
        )
    return getattr(module, what)


def raised_at(error: BaseException) -> str:
    """Return the type and text of an error from the user's code, with file and line."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(PACKAGE)
    ]
    # The last line of the user's code, not of a library that it calls: wandb replaces sys.exit, for example.
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    # The text of a SyntaxError has its own file and line.
    places = [] if isinstance(error, SyntaxError) else (own or frames)[-1:]
    place = "".join(f" ({frame.filename}:{frame.lineno})" for frame in places)
    return f"{type(error).__name__}: {text_of(error)}{place}"


def text_of(value: Any) -> str:
    """Return `value` as text, even if its own `__str__` raises."""
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
        raise ConfigError(f"{name!r} does not exist: {path.absolute()} is not a file.")
    # pickle reads dots in a module's name as packages, and a process pool of the user may pickle its functions.
    digest = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=8).hexdigest()
    key = f"vectorlm_plugin_{digest}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Like a script, the file can import modules of its folder; installed packages come first.
        if (folder := str(path.resolve().parent)) not in sys.path:
            sys.path.append(folder)
        _require_own_neighbours(path.resolve())
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
        # Other processes cannot import this name, but a config with settings of an algorithm goes to all ranks.
        cloudpickle.register_pickle_by_value(module)
    return sys.modules[key]


def _require_own_neighbours(path: Path) -> None:
    """Raise ConfigError if `path`, or a module of its folder, would import a module of another folder by mistake.

    Python keeps one module per name. Installed packages come first and are not checked.
    """
    files = [path]
    for file in files:  # The loop extends the list.
        for name in sorted(_imported(file)):
            beside = (path.parent / f"{name}.py", path.parent / name / "__init__.py")
            own = [candidate.resolve() for candidate in beside if candidate.is_file()]
            taken = getattr(sys.modules.get(name), "__file__", None)
            if own and taken is None and (spec := importlib.util.find_spec(name)) and spec.has_location:
                taken = spec.origin
            if not own or taken is None or taken.startswith(LIBRARIES):
                continue
            if (found := Path(taken).resolve()) not in own:
                raise ConfigError(
                    f"{file} imports {name!r} and would get {found} instead of {own[0]}, because Python "
                    "keeps one module per name. Rename one of the two."
                )
            if found not in files:
                files.append(found)


def _imported(file: Path) -> set[str]:
    """Return the top-level names of the absolute imports in a file."""
    nodes = list(ast.walk(ast.parse(file.read_bytes(), str(file))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def _load_module(where: str, name: str) -> Any:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        # If the module exists but one of its own imports is missing, raise that error.
        if error.name is not None and not f"{where}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{name!r} does not exist: no module named {where!r}.") from error
