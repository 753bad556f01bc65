"""Points that all ranks reach together, with a deadline and the names of those who are missing."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from vectorlm.errors import HandoffTimeout
from vectorlm.ranks.topology import Topology

if TYPE_CHECKING:
    import torch.distributed as dist

# Ranks look for a root's answer themselves: a blocking wait would log a warning at each of its time-outs, and a
# busy one would take a core from the engine.
SHORTEST_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.02


class Meeting:
    """Exchange small notes over the process group's key-value store, and large results over gloo.

    A collective only says that it timed out; the store can tell who came, who did not, and what a missing rank
    did last. The gloo group is the meeting's own, so traffic here never mixes with the trainer's collectives.
    """

    def __init__(self, topology: Topology, timeout_s: float) -> None:
        self._topology = topology
        self._timeout_s = timeout_s
        self._count = 0
        self._posted: list[str] = []
        self._tickets: Counter[str] = Counter()
        self._store: dist.Store | None = None
        self._group: dist.ProcessGroup | None = None
        if topology.world_size > 1:
            self._connect()

    def _connect(self) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        # torch numbers groups alike on every rank, so no two meetings of a run share keys.
        name = self._group.group_name
        self._store = dist.PrefixStore(f"vectorlm/{name}", _get_default_store())

    def gather(self, place: str, note: Any = None) -> list[Any]:
        """Wait until every rank is at `place`, and return what each of them brought.

        Args:
            place: What the ranks are about to do, for the error text.
            note: Small picklable value.

        Returns:
            The notes, by rank.

        Raises:
            HandoffTimeout: A rank did not come within the deadline; the text names it and its last place.
        """
        if self._store is None:
            return [note]
        keys = self._open(place)
        self._post(keys[self._topology.rank], pickle.dumps(note))
        self._wait(keys, place)
        notes = [pickle.loads(self._store.get(key)) for key in keys]
        # Everybody is here, so everybody has read what was posted before.
        *read, now = self._posted
        for key in read:
            self._store.delete_key(key)
        self._posted = [now]
        return notes

    def share(
        self, place: str, note: Any = None, arrays: Sequence[np.ndarray] = (), *, root: int = 0
    ) -> tuple[Any, list[np.ndarray]]:
        """Give what `root` brought to every rank; the others bring nothing and wait as long as it shows life.

        Args:
            place: What the ranks are about to do, for the error text.
            note: Small picklable value.
            arrays: Numbers of any dtype and shape; they travel as one tensor.
            root: The rank that knows.

        Returns:
            The root's note and arrays.

        Raises:
            HandoffTimeout: The root has shown no life for the deadline.
        """
        if self._store is None:
            return note, list(arrays)
        key = self._open(place)[root]
        if self._topology.rank == root:
            sizes = [(array.dtype.str, array.shape) for array in arrays]
            self._post(key, pickle.dumps((note, sizes)))
            self._broadcast([np.ascontiguousarray(array) for array in arrays], root)
            return note, list(arrays)
        self._wait_for(root, key, place)
        note, sizes = pickle.loads(self._store.get(key))
        received = [np.empty(shape, dtype) for dtype, shape in sizes]
        self._broadcast(received, root)
        return note, received

    def _broadcast(self, arrays: Sequence[np.ndarray], root: int) -> None:
        """Fill the arrays of the other ranks with the root's, in one message."""
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
        """Draw the next number, from 0, of the series `name`; every rank draws from the same series."""
        if self._store is None:
            self._tickets[name] += 1
            return self._tickets[name] - 1
        return self._store.add(f"ticket/{name}", 1) - 1

    def show_life(self) -> None:
        """Tell the ranks that wait in `share` that this one is alive and making progress."""
        if self._store is not None:
            self._store.add(f"life/{self._topology.rank}", 1)

    def close(self) -> None:
        """Let go of the group; not a collective."""
        if self._group is not None:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def _open(self, place: str) -> list[str]:
        """Say where this rank is, and return the keys of the next meeting, by rank."""
        assert self._store is not None
        self._count += 1
        self._store.set(f"place/{self._topology.rank}", place)
        return [f"{self._count}/{rank}" for rank in range(self._topology.world_size)]

    def _post(self, key: str, value: str | bytes) -> None:
        assert self._store is not None
        self._store.set(key, value)  # type: ignore[arg-type]
        self._posted.append(key)

    def _wait(self, keys: list[str], place: str) -> None:
        assert self._store is not None
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if not missing:
                return
            raise HandoffTimeout(self._absence(place, missing)) from error

    def _absence(self, place: str, missing: list[int]) -> str:
        assert self._store is not None
        here = [rank for rank in range(self._topology.world_size) if rank not in missing]
        last = {}
        for rank in missing:
            key = f"place/{rank}"
            last[rank] = self._store.get(key).decode() if self._store.check([key]) else "nothing yet"
        places = ", ".join(f"rank {rank}: {what}" for rank, what in last.items())
        return (
            f"{_ranks(here)} reached {place!r} but {_ranks(missing)} did not within {self._timeout_s:g} s "
            f"(last meeting of {places}). Every rank must make the same engine calls in the same order."
        )

    def _wait_for(self, root: int, key: str, place: str) -> None:
        assert self._store is not None
        life, since, pause_s = -1, time.monotonic(), SHORTEST_PAUSE_S
        while not self._store.check([key]):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            seen = self._store.add(f"life/{root}", 0)
            if seen != life:
                life, since = seen, time.monotonic()
            if time.monotonic() - since > self._timeout_s:
                raise HandoffTimeout(
                    f"rank {self._topology.rank} waited for rank {root} at {place!r}, which has shown no life "
                    f"for {self._timeout_s:g} s."
                )


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
