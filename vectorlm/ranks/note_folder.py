"""A key-value store of small notes, each a file of a folder that only its user can open."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path


class NoteFolder:
    """Does what `Collectives` needs of torch's stores, on one machine and without a port.

    torch's own store in a file keeps everything that was ever written to it: a run of a day would fill the disk.
    """

    def __init__(self, path: Path) -> None:
        """Make the folder, unless another rank has."""
        path.mkdir(mode=0o700, exist_ok=True)
        self._path = path

    def set(self, key: str, value: str | bytes) -> None:
        """Write a note; readers find all of it or none."""
        path = self._of(key)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(value.encode() if isinstance(value, str) else value)
        partial.replace(path)

    def get(self, key: str) -> bytes:
        """Return a note that is there."""
        return self._of(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these notes are there."""
        return all(os.path.exists(self._of(key)) for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, 0 at first, and return its value."""
        with self._of(key).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            value = int(file.read() or 0) + amount
            if amount:
                file.truncate(0)
                file.write(b"%d" % value)
                file.flush()
            # Another thread may have forked meanwhile, and the fork would keep the lock as long as it lives.
            fcntl.flock(file, fcntl.LOCK_UN)
        return value

    def delete_key(self, key: str) -> None:
        """Delete a note, if it is there."""
        self._of(key).unlink(missing_ok=True)

    def _of(self, key: str) -> Path:
        return self._path / key.replace("/", "-")
