"""Code of the user: objects by names like ``file.py:NAME`` or ``package.module:NAME``.

A run that was begun in Python keeps functions in a file of its own, ``functions.pkl``, with their names.
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
"""How the names of files begin that are not the user's; code that is not in a file has a name in brackets."""


def is_plugin(name: str) -> bool:
    """Return whether `name` has this form."""
    where, colon, what = name.rpartition(":")
    return bool(colon and where) and what.isidentifier()


def load_plugin(name: str) -> Any:
    """Import a file or module and return one of its attributes.

    Raises:
        ConfigError: One of them does not exist, or raises while it is imported, or would end the process.
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
    """Return the type and text of an error that the user's code has raised, with file and line."""
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(PACKAGE)
    ]
    # The user's own line, not that of a library it calls: wandb replaces sys.exit, for example.
    own = [each for each in frames if not each.filename.startswith(LIBRARIES)]
    # The text of a SyntaxError names them.
    places = [] if isinstance(error, SyntaxError) else (own or frames)[-1:]
    place = "".join(f" ({each.filename}:{each.lineno})" for each in places)
    return f"{type(error).__name__}: {text_of(error)}{place}"


def text_of(value: Any) -> str:
    """Return a value of the user's code as text; its class may raise where it is asked for one."""
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
    # Without dots, which pickle takes for packages: a process pool of the user's runs functions of the file.
    digest = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=8).hexdigest()
    key = f"vectorlm_plugin_{digest}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # As for a script, so that it finds its neighbours, now and when it is called; behind what is installed.
        if (folder := str(path.resolve().parent)) not in sys.path:
            sys.path.append(folder)
        _require_own_neighbours(path.resolve())
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
        # No other process can import it by this name: a config with an algorithm's own settings goes to all ranks.
        cloudpickle.register_pickle_by_value(module)
    return sys.modules[key]


def _require_own_neighbours(path: Path) -> None:
    """Raise ConfigError if `path`, or a neighbour it imports, gets a module of the user's from another folder.

    Python keeps one module by each name. What is installed goes before neighbours and is not looked at.
    """
    files = [path]
    for file in files:  # It grows.
        for name in sorted(_imported(file)):
            beside = (path.parent / f"{name}.py", path.parent / name / "__init__.py")
            own = [each.resolve() for each in beside if each.is_file()]
            taken = getattr(sys.modules.get(name), "__file__", None)
            if own and taken is None and (spec := importlib.util.find_spec(name)) and spec.has_location:
                taken = spec.origin
            if not own or taken is None or taken.startswith(LIBRARIES):
                continue
            if (found := Path(taken).resolve()) not in own:
                raise ConfigError(
                    f"{file} imports {name!r} and would get {found} in place of {own[0]}: Python keeps one module by "
                    "each name. Rename one of the two."
                )
            if found not in files:
                files.append(found)


def _imported(file: Path) -> set[str]:
    """Return the packages and modules of absolute imports in a file, without what follows a dot."""
    nodes = list(ast.walk(ast.parse(file.read_bytes(), str(file))))
    names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def _load_module(where: str, name: str) -> Any:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        # A module that it imports may be missing: that is its own error.
        if error.name is not None and not f"{where}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{name!r} does not exist: no module named {where!r}.") from error
