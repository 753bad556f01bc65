"""Points that all ranks reach together, with a deadline and the names of those who are missing."""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from vectorlm.errors import HandoffTimeout
from vectorlm.ranks.topology import Topology

if TYPE_CHECKING:
    import torch.distributed as dist

# Ranks look for rank 0's answer themselves: a blocking wait would log a warning at each of its time-outs, and a
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

    def share(self, place: str, message: bytes | None = None) -> bytes:
        """Give rank 0's `message` to every rank; the others pass nothing and wait as long as rank 0 shows life.

        Raises:
            HandoffTimeout: Rank 0 has shown no life for the deadline.
        """
        if self._store is None:
            assert message is not None
            return message
        import torch
        import torch.distributed as dist

        key = self._open(place)[0]
        if self._topology.is_main:
            assert message is not None
            self._post(key, str(len(message)))
            payload = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        else:
            self._wait_for_main(key, place)
            payload = torch.empty(int(self._store.get(key)), dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self._group)
        return payload.numpy().tobytes()

    def show_life(self) -> None:
        """Tell the ranks that wait in `share` that rank 0 is alive and making progress."""
        if self._store is not None:
            self._store.add("life", 1)

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

    def _wait_for_main(self, key: str, place: str) -> None:
        assert self._store is not None
        life, since, pause_s = -1, time.monotonic(), SHORTEST_PAUSE_S
        while not self._store.check([key]):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            seen = self._store.add("life", 0)
            if seen != life:
                life, since = seen, time.monotonic()
            if time.monotonic() - since > self._timeout_s:
                raise HandoffTimeout(
                    f"rank {self._topology.rank} waited for rank 0 at {place!r}, which has shown no life "
                    f"for {self._timeout_s:g} s."
                )


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
