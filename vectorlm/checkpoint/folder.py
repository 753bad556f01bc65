"""A folder that appears under its name only when it is complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def unfinished(path: Path) -> Path:
    """Return where the folder `path` is put together; readers never look there."""
    return path.with_name(f".{path.name}.unfinished")


def begin(path: Path) -> Path:
    """Make an empty folder to put `path` together in, dropping what killed runs left beside it."""
    for leftover in (*path.parent.glob(".*.unfinished"), *path.parent.glob(".*.retired")):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished(path).mkdir(parents=True)
    return unfinished(path)


def finish(path: Path) -> None:
    """Give the folder put together for `path` its name, in place of an older one of that name.

    Everything in it is on disk by then: a folder with a name is complete even after a power cut.
    """
    for each in unfinished(path).rglob("*"):
        _sync(each)
    _sync(unfinished(path))
    retire(path)
    os.replace(unfinished(path), path)
    _sync(path.parent)


def retire(path: Path) -> None:
    """Delete a complete folder such that no moment shows half of it under its name."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.retired")
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
