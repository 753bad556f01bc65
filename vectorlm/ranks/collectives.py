"""Exchanges between ranks, with a deadline and an error that names the missing ranks."""

from __future__ import annotations

import fcntl
import hmac
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from vectorlm.errors import EngineError, HandoffTimeout, LaunchError, RankFailed, RankMismatch
from vectorlm.ranks.process_end import require_own_process
from vectorlm.ranks.topology import Topology
from vectorlm.ranks.wait import EVERY_S, say, span

# Ranks poll: a blocking wait logs a warning at each time-out, and a busy wait takes a core from the engine.
SHORTEST_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.02
PROBE_EVERY_S = 5.0
"""Interval at which a waiting rank tests its connections to missing ranks, in seconds."""
PROBE_TAG = 7
LATE_S = 30.0
"""After this time, and then every `EVERY_S`, a waiting rank prints which rank it waits for."""
KEY_BYTES = SIGNATURE_BYTES = 32
NAME_BYTES = 8


class Collectives:
    """Collectives for small objects, over a key-value store or a folder, and for large arrays, over gloo.

    The time-out error of a torch collective names no rank. The store records which ranks arrived, and the last place
    of a missing rank. The gloo group is private to this object, so its traffic never mixes with the trainer's.
    """

    def __init__(self, topology: Topology, timeout_s: float) -> None:
        self._topology = topology
        self._timeout_s = timeout_s
        self._count, self._pid = 0, os.getpid()
        self._posted: list[str] = []
        self._is_closed = False
        self._store: Any = None
        self._group: Any = None
        if topology.world_size > 1:
            import torch
            import torch.distributed as dist
            from torch.distributed.distributed_c10d import _get_default_store

            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            # The sum of all ranks' random bytes, sent over gloo because strangers may read the store. Not a broadcast:
            # after it rank 0 could close the group while another rank still connects.
            key = torch.frombuffer(bytearray(os.urandom(KEY_BYTES + NAME_BYTES)), dtype=torch.uint8)
            dist.all_reduce(key, group=self._group)
            drawn = key.numpy().tobytes()
            self._key = drawn[:KEY_BYTES]
            # torch uses a group's name again after `destroy_process_group`, and the store may outlive the groups.
            name, store = f"vectorlm-{drawn[KEY_BYTES:].hex()}", _get_default_store()
            self._store = dist.PrefixStore(name, store)
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            if isinstance(store, dist.FileStore) and topology.num_nodes == 1:
                self._store = NoteFolder(Path(store.path).with_name(name))  # type: ignore[attr-defined]
            self._reads_many = isinstance(store, dist.TCPStore)

    def all_gather_object(self, place: str, note: Any = None) -> list[Any]:
        """Wait until every rank is at `place`, and return the notes of all ranks, small picklable objects, by rank.

        Raises `HandoffTimeout`, with the missing ranks and their last places, if a rank does not come in time, and
        `RankFailed` if its connection is closed.
        """
        if self._store is None:
            return [note]
        keys = self._open(place)
        self._post(keys[self._topology.rank], place, note)
        self._wait_for_all(place, keys)
        # One request for all keys: otherwise each of 64 ranks would make 64 requests.
        signed = self._store.multi_get(keys) if self._reads_many else map(self._store.get, keys)
        places, notes = zip(*map(self._opened, keys, signed), strict=True)
        self._require_same_place(dict(enumerate(places)))
        # Every rank is here, so every rank has read what was posted before.
        *read, now = self._posted
        for key in read:
            self._store.delete_key(key)
        self._posted = [now]
        return list(notes)

    def broadcast_object(
        self, place: str, note: Any = None, arrays: Sequence[np.ndarray] = (), *, root: int = 0
    ) -> tuple[Any, list[np.ndarray]]:
        """Return the note and the arrays of `root` on every rank; the other ranks pass nothing.

        The arrays travel as one tensor. Raises `HandoffTimeout` if `root` did not call `show_life` within the deadline,
        and `RankFailed` if its connection is closed.
        """
        if self._store is None:
            return note, list(arrays)
        keys = self._open(place)
        key = keys[root]
        if self._topology.rank == root:
            sizes = [(array.dtype.str, array.shape) for array in arrays]
            self._post(key, place, (note, sizes))
            self._broadcast([np.ascontiguousarray(array) for array in arrays], root)
            return note, list(arrays)
        self._wait_for(root, keys, place)
        root_place, sent = self._opened(key, self._store.get(key))
        if root_place != place:
            # Ranks in `all_gather_object` wait for this note; with it they raise the same error.
            self._post(keys[self._topology.rank], place, None)
            self._require_same_place({root: root_place, self._topology.rank: place})
        note, sizes = sent
        received = [np.empty(shape, dtype) for dtype, shape in sizes]
        self._broadcast(received, root)
        return note, received

    def _broadcast(self, arrays: Sequence[np.ndarray], root: int) -> None:
        """Copy the arrays of `root` into the arrays of the other ranks, in one message."""
        import torch
        import torch.distributed as dist

        raw = [array.reshape(-1).view(np.uint8) for array in arrays]
        if not any(piece.size for piece in raw):
            return
        together = torch.from_numpy(np.concatenate(raw))
        dist.broadcast(together, src=root, group=self._group)
        if self._topology.rank == root:
            return
        first = 0
        for piece in raw:
            piece[:] = together[first : first + piece.size].numpy()
            first += piece.size

    def ticket(self, name: str) -> int:
        """Return the next number of the counter `name`, from 0; no two ranks get the same number."""
        return self._store.add(f"ticket/{name}", 1) - 1

    def forget_tickets(self, name: str) -> None:
        """Delete the counter `name` after its last use."""
        if self._topology.is_main:
            self._store.delete_key(f"ticket/{name}")

    def show_life(self) -> None:
        """Tell the ranks that wait in `broadcast_object` that this one is alive and making progress."""
        if self._store is not None:
            self._store.add(f"life/{self._topology.rank}", 1)

    def require_open(self) -> None:
        """Raise `EngineError` if the engine that uses this object is closed."""
        if self._is_closed:
            raise EngineError("the engine is closed.")

    def close(self) -> None:
        """Destroy the gloo group; not a collective."""
        self._is_closed = True
        if self._group is not None:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def _open(self, place: str) -> list[str]:
        """Record where this rank is, and return the keys of the next exchange, by rank."""
        require_own_process(self._pid)
        self._count += 1
        self._store.set(f"place/{self._topology.rank}", place)
        return [f"{self._count}/{rank}" for rank in range(self._topology.world_size)]

    def _require_same_place(self, places: Mapping[int, str]) -> None:
        """Raise `RankMismatch` unless `places` has the same place for every rank."""
        if len(set(places.values())) > 1:
            where = ", ".join(f"rank {rank} is in {place!r}" for rank, place in sorted(places.items()))
            raise RankMismatch(f"{where}. Every rank must make the same engine calls in the same order.")

    def _post(self, key: str, place: str, note: Any) -> None:
        message = pickle.dumps((place, note))
        self._store.set(key, self._signature(key, message) + message)
        self._posted.append(key)

    def _opened(self, key: str, signed: bytes) -> tuple[str, Any]:
        """Return a rank's place and note; unpickle only what a rank signed, because the store has an open port."""
        signature, message = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(key, message)):
            raise LaunchError(
                f"the note {key} in the ranks' key-value store was not written by a rank of this run: somebody else "
                "can reach the store's port."
            )
        place, note = pickle.loads(message)
        return place, note

    def _signature(self, key: str, message: bytes) -> bytes:
        return hmac.digest(self._key, key.encode() + b"\0" + message, "sha256")

    def _last_places(self, ranks: Sequence[int]) -> str:
        texts = []
        for rank in ranks:
            has_place = self._store.check([f"place/{rank}"])
            place = self._store.get(f"place/{rank}").decode() if has_place else "nothing yet"
            texts.append(f"last place of rank {rank}: {place}")
        return ", ".join(texts)

    def _wait_for_all(self, place: str, keys: Sequence[str]) -> None:
        """Wait for the notes of all ranks; after `LATE_S` print the missing ranks."""
        since = time.monotonic()
        late_at, look_at = since + LATE_S, since + min(PROBE_EVERY_S, self._timeout_s)
        while not self._store.check(list(keys)):
            now = time.monotonic()
            _pause(now - since)
            if now < look_at:
                continue
            look_at = min(now + PROBE_EVERY_S, since + self._timeout_s)
            if missing := [rank for rank, key in enumerate(keys) if not self._store.check([key])]:
                self._require_connected(place, missing, keys)
                if now - since >= self._timeout_s:
                    here = [rank for rank in range(self._topology.world_size) if rank not in missing]
                    raise HandoffTimeout(
                        f"{ranks_text(here)} reached {place!r} but {ranks_text(missing)} did not within "
                        f"{self._timeout_s:g} s ({self._last_places(missing)}). Every rank must make the same engine "
                        "calls in the same order."
                    )
                late_at = self._say_late(place, missing, since, late_at)

    def _require_connected(self, place: str, missing: Sequence[int], keys: Sequence[str]) -> None:
        """Raise `RankFailed` if the connection to a missing rank is closed; a busy or stopped rank keeps it open."""
        import torch
        import torch.distributed as dist

        gone = []
        for rank in missing:
            try:
                # Nobody receives this byte: gloo stores about 100 bytes on both ends, or raises immediately.
                dist.isend(torch.zeros(1, dtype=torch.uint8), rank, group=self._group, tag=PROBE_TAG)
            except RuntimeError:
                # The rank may have arrived and ended in the meantime.
                gone += [] if self._store.check([keys[rank]]) else [rank]
        if gone:
            raise RankFailed(
                f"rank {self._topology.rank} waits at {place!r} for {ranks_text(gone)}, whose connection is closed: "
                f"its process died, or it has closed its engine ({self._last_places(gone)}). Look at its own output."
            )

    def _say_late(self, place: str, missing: list[int], since: float, due: float) -> float:
        """Print the missing ranks on the first waiting rank, if it is time; return the time of the next line."""
        if (now := time.monotonic()) < due:
            return due
        if self._topology.rank == next(rank for rank in range(len(missing) + 1) if rank not in missing):
            say(
                f"{place}: waited {span(now - since)} for {ranks_text(missing)} ({self._last_places(missing)})"
            )
        return now + EVERY_S

    def _wait_for(self, root: int, keys: Sequence[str], place: str) -> None:
        life, since, due, probe_at, began = -1, 0.0, 0.0, 0.0, time.monotonic()
        while not self._store.check([keys[root]]):
            _pause(time.monotonic() - began)
            seen = self._store.add(f"life/{root}", 0)
            if seen != life:
                life, since = seen, time.monotonic()
                due, probe_at = since + LATE_S, since + PROBE_EVERY_S
            due = self._say_late(place, [root], since, due)
            if time.monotonic() > probe_at:
                self._require_connected(place, [root], keys)
                probe_at = time.monotonic() + PROBE_EVERY_S
            if time.monotonic() - since > self._timeout_s:
                raise HandoffTimeout(
                    f"rank {self._topology.rank} waited at {place!r} for rank {root}, which has not made progress for "
                    f"{self._timeout_s:g} s."
                )


def _pause(waited_s: float) -> None:
    """Sleep between two checks of the store, for a twentieth of the time waited so far, within limits."""
    time.sleep(min(max(waited_s / 20, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks as text for an error."""
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


class NoteFolder:
    """A key-value store in a folder with the methods of torch's stores, for one machine and without a port.

    torch's FileStore keeps everything that was ever written, which would fill the disk within a day.
    """

    def __init__(self, path: Path) -> None:
        """Create the folder, unless another rank has done so."""
        path.mkdir(mode=0o700, exist_ok=True)
        self._path = path

    def set(self, key: str, value: str | bytes) -> None:
        """Write a note atomically."""
        path = self._of(key)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(value.encode() if isinstance(value, str) else value)
        partial.replace(path)

    def get(self, key: str) -> bytes:
        """Return an existing note."""
        return self._of(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these notes exist."""
        return all(os.path.exists(self._of(key)) for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its value."""
        with self._of(key).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            value = int(file.read() or 0) + amount
            if amount:
                file.truncate(0)
                file.write(b"%d" % value)
                file.flush()
            # If another thread has forked in the meantime, the fork would keep the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
        return value

    def delete_key(self, key: str) -> None:
        """Delete a note, if it exists."""
        self._of(key).unlink(missing_ok=True)

    def _of(self, key: str) -> Path:
        return self._path / key.replace("/", "-")
