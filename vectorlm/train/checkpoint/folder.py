"""Folders of a run: complete as soon as they have their name, and shared by all nodes."""

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

HELD_PATIENCE_S = 3.0
"""A run that was killed a moment ago may not be gone yet."""
OF_OTHER_RANKS = re.compile(r"gloo|NCCL|^Dist\w*Error")
"""How torch says that another rank is gone, or does not come."""
FAILURES = {
    "read": (
        "the checkpoint {} cannot be read",
        "Delete it, and the run goes on from the one before, or starts over.",
    ),
    "write": (
        "the checkpoint {} cannot be written",
        "The one before is whole: once the disk can be written to, the same command goes on from it.",
    ),
    "export": (
        "the model {} cannot be written",
        "No half of it is left: with a checkpoint, the same command writes it once the cause is gone.",
    ),
}
"""What could not be done with a folder, and what to do then."""
EARLY = "stopped early"
"""What a run that stopped early notes in its newest checkpoint."""
FORMAT = 1
"""What a checkpoint holds; it goes up when an earlier version could not read a new one."""
PATIENCE_S = 10.0
"""Network file systems may take some seconds to show another machine's new file."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    identity: dict[str, Any]
    """What it notes of its run."""
    is_finished: bool
    """Whether the run ended with it and exported its model."""
    stopped_early: bool = False
    """Whether it ended before its last step."""


def steps_in(path: Path) -> list[int]:
    """Return the steps of the complete checkpoints under `path`, in order."""
    numbers = (each.name.removeprefix("step-") for each in path.glob("step-*"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def folder_of(path: Path, step: int) -> Path:
    """Return where the checkpoint of `step` is."""
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
            f"{found} has format {identity['format']}, which a newer version of vectorlm wrote; this one reads up to "
            f"{FORMAT}. Install that version, or choose another output_dir."
        )
    note = found / "finished"
    is_finished = note.exists()
    return FoundCheckpoint(steps[-1], found, identity, is_finished, is_finished and note.read_text() == EARLY)


def mark_finished(path: Path, stopped_early: bool = False) -> None:
    """Note in the newest checkpoint under `path` that its run has exported its model."""
    for step in steps_in(path)[-1:]:
        (folder_of(path, step) / "finished").write_text(EARLY if stopped_early else "")


@contextlib.contextmanager
def naming(path: Path, doing: Literal["read", "write", "export"]) -> Iterator[None]:
    """Name the folder `path` in what the block raises, what to do then, and whether its disk is full.

    Raises:
        CheckpointError: The block failed, unless only another rank did, or the process is ending.
    """
    try:
        yield
    except BaseException as error:
        of_others = OF_OTHER_RANKS.search(f"{type(error).__name__}: {error}")
        if of_others or isinstance(error, KeyboardInterrupt | SystemExit | CheckpointError):
            raise
        # torch's CheckpointException, a BaseException, holds what each rank raised; its own first line says nothing.
        failures = getattr(error, "failures", {})
        causes = [cause for _, (cause, _) in sorted(failures.items())]
        cause = causes[0] if causes else error
        text = f"{type(cause).__name__}: {cause}"
        disk = next(each for each in path.absolute().parents if each.exists())
        if doing != "read" and not shutil.disk_usage(disk).free:
            # Not every library that writes says so.
            text = f"No space left on device: {text}"
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        written = (each.stat().st_size for each in unfinished(path).rglob("*") if each.is_file())
        if doing != "read" and limit != resource.RLIM_INFINITY and max(written, default=0) >= limit:
            text = f"File too large: this process may write files of {limit:,} bytes (ulimit -f): {text}"
        what, fix = FAILURES[doing]
        notes = " ".join(["", *getattr(error, "__notes__", ())])
        text = f"{what.format(path)} ({text}). {fix}{notes}"
        raise CheckpointError(text).of_rank(min(failures, default=None)) from error


@contextlib.contextmanager
def naming_the_full_disk(path: str) -> Iterator[None]:
    """Say of an error for want of space where that was: Python says so only where a file is opened."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            error.filename = path
        raise


def digests(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each of the files below `path`, by its name; empty for one that cannot be read."""
    found = {}
    for name in names:
        found[name] = ""
        with contextlib.suppress(OSError), (path / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def unfinished(path: Path) -> Path:
    """Return where the folder `path` is written; readers never look there."""
    return path.with_name(f".{path.name}.unfinished")


def begin(path: Path, names: str | None = None) -> Path:
    """Make an empty folder to write `path` in; remove what killed runs left of it, or of folders called `names`."""
    names = names or glob.escape(path.name)
    for replaced in path.parent.glob(f".{names}.replaced"):
        name = path.with_name(replaced.name[1:].removesuffix(".replaced"))
        if not name.exists():
            os.replace(replaced, name)
    work = unfinished(path)
    for ending in ("unfinished", "retired", "replaced"):
        for leftover in path.parent.glob(f".{names}.{ending}"):
            # Its own folder says why it stays: the file system may be read-only.
            shutil.rmtree(leftover, ignore_errors=leftover != work)
    work.mkdir(parents=True)
    return work


def finish(path: Path) -> None:
    """Rename the `unfinished` folder of `path` to `path`, replacing an older one.

    Everything in it is on disk by then: a folder with its final name is complete even after a power cut.
    """
    work = unfinished(path)
    for each in work.rglob("*"):
        _sync(each)
    _sync(work)
    replaced = path.with_name(f".{path.name}.replaced")
    if path.exists():
        os.replace(path, replaced)
    os.replace(work, path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


_held: set[int] = set()
"""The descriptors of the folders that this process holds."""


def _let_go() -> None:
    """Close what a fork inherited: a helper that user code has started must not hold the folder beyond its run."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def held(path: Path, patience_s: float = HELD_PATIENCE_S) -> Iterator[None]:
    """Keep other runs out of the folder `path` for the block; it is made, and gets no file.

    Raises:
        ConfigError: Another run holds it, and goes on holding it for `patience_s`.
    """
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY)
    _held.add(descriptor)
    deadline = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"train_parameters.output_dir='{path}' is in use by another run. Wait for its end, or name "
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
        if descriptor in _held:
            _held.remove(descriptor)
            os.close(descriptor)


def is_held(path: Path, patience_s: float = HELD_PATIENCE_S) -> bool:
    """Whether a run holds the folder `path`, and goes on holding it for `patience_s`."""
    if not path.is_dir():
        return False
    try:
        with held(path, patience_s):
            return False
    except ConfigError:
        return True


def retire(path: Path) -> None:
    """Delete a complete folder; it is renamed first, so that no reader finds half of it.

    A link is removed and what it leads to left alone. What cannot be deleted is no reason to end a run.
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
    """Make the folder `path` on rank 0 and check that all nodes see it; called on all ranks.

    Raises a `CheckpointError` on every rank if a rank does not see rank 0's folder: each rank writes its own shards of
    a checkpoint, so no node would have all of them.
    """
    if topology.num_nodes == 1:
        return
    marker = Path(path, f".seen-by-all-{uuid.uuid4().hex}")
    if topology.is_main:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    try:
        # Nobody looks before it is there: a network file system may remember for a while what it did not find.
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
            f"{nodes} not see the output_dir {path} of node 0: each rank writes its shards of a checkpoint, so all "
            "nodes must share the folder. Use a folder on a shared file system, or set "
            "train_parameters.checkpointing_enabled=False."
        )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
