"""Folders that are complete once they have their final name, their locks, and the checkpoints in them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import resource
import shutil
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vectorlm.errors import CheckpointError, ConfigError
from vectorlm.ranks.engine_ranks import gather
from vectorlm.ranks.topology import Topology

LOCK_PATIENCE_S = 3.0
"""Seconds to wait for a lock: a run that was just killed may still be ending."""
OF_OTHER_RANKS = re.compile(r"gloo|NCCL|^Dist\w*Error")
"""Matches the errors that torch raises because another rank is gone."""
FAILURES = {
    "read": "the checkpoint {} cannot be read ({}). Delete it to continue from the one before, or to start over.",
    "write": "the checkpoint {} cannot be written ({}). Fix the cause and run the same command again: the previous "
    "checkpoint is intact.",
    "export": "the model {} cannot be written ({}). Fix the cause and run the same command again: no partial folder is "
    "left.",
}
"""Error messages by operation, with places for the folder and the cause."""
EARLY = "stopped early"
"""Content of the file `finished` if the run stopped early."""
FORMAT = 1
"""Version of the checkpoint format; increased when older versions could not read new checkpoints."""
PATIENCE_S = 10.0
"""Seconds that network file systems may take to show another machine's new file."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    identity: dict[str, Any]
    """Facts about the run, from identity.json."""
    is_finished: bool
    """Whether the run ended here and exported its model."""
    stopped_early: bool = False
    """Whether the run ended before its last step."""


def steps_in(path: Path) -> list[int]:
    """Return the steps of the complete checkpoints under `path`, in order."""
    numbers = (found.name.removeprefix("step-") for found in path.glob("step-*"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def folder_of(path: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`."""
    return path / f"step-{step:08d}"


def newest(path: Path) -> FoundCheckpoint | None:
    """Return the newest complete checkpoint under `path`.

    Raises:
        CheckpointError: It cannot be read.
    """
    steps = steps_in(path)
    if not steps:
        return None
    found = folder_of(path, steps[-1])
    with naming(found, "read"):
        identity = json.loads((found / "identity.json").read_text(encoding="utf-8"))
        assert isinstance(identity, dict), "identity.json holds no object"
    if identity.get("format", 0) > FORMAT:
        raise CheckpointError(
            f"{found} has format {identity['format']} of a newer vectorlm; this one reads up to {FORMAT}. Install the "
            "newer version, or choose another output_dir."
        )
    note = found / "finished"
    is_finished = note.exists()
    return FoundCheckpoint(steps[-1], found, identity, is_finished, is_finished and note.read_text() == EARLY)


def mark_finished(path: Path, stopped_early: bool = False) -> None:
    """Record in the newest checkpoint under `path` that its run has exported its model."""
    for step in steps_in(path)[-1:]:
        (folder_of(path, step) / "finished").write_text(EARLY if stopped_early else "")


@contextlib.contextmanager
def naming(path: Path, doing: Literal["read", "write", "export"]) -> Iterator[None]:
    """Turn errors of the block into a `CheckpointError` with the folder and the cause, such as a full disk.

    Raises:
        CheckpointError: The block failed, unless another rank caused it, or the process is ending.
    """
    try:
        yield
    except BaseException as error:
        is_foreign = OF_OTHER_RANKS.search(f"{type(error).__name__}: {error}")
        if is_foreign or isinstance(error, KeyboardInterrupt | SystemExit | CheckpointError):
            raise
        # torch's CheckpointException, a BaseException, contains the ranks' errors; its own first line is useless.
        failures = getattr(error, "failures", {})
        causes = [cause for _, (cause, _) in sorted(failures.items())]
        cause = causes[0] if causes else error
        text = f"{type(cause).__name__}: {cause}"
        disk = next(parent for parent in path.absolute().parents if parent.exists())
        if doing != "read" and not shutil.disk_usage(disk).free:
            # Not all libraries report a full disk.
            text = f"No space left on device: {text}"
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        written = (file.stat().st_size for file in unfinished(path).rglob("*") if file.is_file())
        if doing != "read" and limit != resource.RLIM_INFINITY and max(written, default=0) >= limit:
            text = f"File too large: this process may write files of {limit:,} bytes (ulimit -f): {text}"
        message = " ".join([FAILURES[doing].format(path, text), *getattr(error, "__notes__", ())])
        raise CheckpointError(message).of_rank(min(failures, default=None)) from error


@contextlib.contextmanager
def naming_the_full_disk(path: str) -> Iterator[None]:
    """Add `path` to errors about a full disk: Python names a file only in errors of open()."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            error.filename = path
        raise


def digests(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of files below `path` by name; "" for a file that cannot be read."""
    found = {}
    for name in names:
        found[name] = ""
        with contextlib.suppress(OSError), (path / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def unfinished(path: Path) -> Path:
    """Return the hidden folder in which `path` is written."""
    return path.with_name(f".{path.name}.unfinished")


def begin(path: Path, names: str | None = None) -> Path:
    """Make an empty folder to write `path` in; clean up after killed runs, for `path` or all folders named `names`."""
    names = names or glob.escape(path.name)
    for replaced in path.parent.glob(f".{names}.replaced"):
        name = path.with_name(replaced.name[1:].removesuffix(".replaced"))
        if not name.exists():
            os.replace(replaced, name)
    work = unfinished(path)
    for ending in ("unfinished", "retired", "replaced"):
        for leftover in path.parent.glob(f".{names}.{ending}"):
            # An error for `work` itself names the cause, such as a read-only file system.
            shutil.rmtree(leftover, ignore_errors=leftover != work)
    work.mkdir(parents=True)
    return work


def finish(path: Path) -> None:
    """Rename the `unfinished` folder of `path` to `path`, replacing an older one.

    Its files are on the disk before it gets its final name, and it is complete even after a power cut.
    """
    work = unfinished(path)
    for item in [*work.rglob("*"), work]:
        _sync(item)
    replaced = path.with_name(f".{path.name}.replaced")
    if path.exists():
        os.replace(path, replaced)
    os.replace(work, path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


_locked: set[int] = set()
"""Descriptors of the folders that this process has locked."""


def _let_go() -> None:
    """Close the inherited locks after a fork: a helper process of user code must not keep them beyond the run."""
    for descriptor in _locked:
        os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def locked(path: Path, patience_s: float = LOCK_PATIENCE_S) -> Iterator[None]:
    """Lock the folder `path` against other runs during the block; the folder is made, but gets no lock file.

    Raises:
        ConfigError: Another run has locked it, and does not release it within `patience_s`.
    """
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY)
    _locked.add(descriptor)
    deadline = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"train_parameters.output_dir='{path}' is in use by another run. Wait for its end, or choose "
                        "another folder."
                    ) from error
                time.sleep(0.1)
                continue
            except OSError as error:
                # Some network file systems have no locks.
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                    raise
            break
        yield
    finally:
        if descriptor in _locked:
            _locked.remove(descriptor)
            os.close(descriptor)


def is_locked(path: Path, patience_s: float = LOCK_PATIENCE_S) -> bool:
    """Whether a run has locked the folder `path`, and does not release it within `patience_s`."""
    if not path.is_dir():
        return False
    try:
        with locked(path, patience_s):
            return False
    except ConfigError:
        return True


def retire(path: Path) -> None:
    """Delete a complete folder; it is renamed first, because no reader may find a partial one.

    A link is removed without its target. If the folder cannot be deleted, this only warns.
    """
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        doomed = path.with_name(f".{path.name}.retired")
        os.replace(path, doomed)
        try:
            shutil.rmtree(doomed)
        except OSError as error:
            warnings.warn(f"the old checkpoint {doomed} cannot be deleted ({error})", stacklevel=2)


def require_shared(path: str | Path, topology: Topology) -> None:
    """Check that all nodes see the folder `path`, which rank 0 makes; all ranks call this.

    On a single node, do nothing.

    Raises:
        CheckpointError: A node does not see rank 0's folder; all ranks raise. No node would have all shards of a
            checkpoint, because each rank writes its own shards.
    """
    if topology.num_nodes == 1:
        return
    marker = Path(path, f".seen-by-all-{uuid.uuid4().hex}")
    if topology.is_main:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    try:
        # Look only after the file exists: network file systems may cache that a file is missing.
        name = gather(topology, marker.name)[0]
        deadline = time.monotonic() + PATIENCE_S
        while not (sees := Path(path, name).exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        seen = gather(topology, sees)
    finally:
        if topology.is_main:
            marker.unlink()
    blind = sorted({rank // topology.local_world_size for rank, sees in enumerate(seen) if not sees})
    if blind:
        nodes = f"node {blind[0]} does" if len(blind) == 1 else f"nodes {', '.join(map(str, blind))} do"
        raise CheckpointError(
            f"{nodes} not see the output_dir {path} of node 0, but all nodes must share it: each rank writes its "
            "shards there. Use a shared file system, or set train_parameters.checkpointing_enabled=False."
        )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
