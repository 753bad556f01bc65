"""Which packages are installed, and in which version; none is imported to find out."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


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
