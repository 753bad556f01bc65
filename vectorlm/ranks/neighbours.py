"""The launchers of a run's other nodes, watched while the ranks work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from types import TracebackType

from vectorlm.ranks.assembly import Assembly, receive, send
from vectorlm.ranks.node import Node

BEAT_S = 0.5
SILENCE_S = 20.0
"""A launcher that shows no life for so long is lost; the end of its connection is noticed at once."""
FAREWELL_S = 5.0


class Neighbours:
    """Tells the other nodes why this one ends, and ends this one when another does.

    Node 0 decides what the cause was, for everybody: whatever it hears of first. Launchers are connected to node 0
    only, and send each other a sign of life twice a second.
    """

    def __init__(self, node: Node, assembly: Assembly, end_ranks: Callable[[], None]) -> None:
        """Start to watch.

        Args:
            node: This machine's place.
            assembly: The connections to the others.
            end_ranks: Ends this node's ranks; called once, from another thread, when another node has failed.
        """
        self._node = node
        self._hosts = assembly.hosts
        self._store = assembly.store
        self._links = dict(assembly.links)
        self._heard_s = dict.fromkeys(self._links, time.monotonic())
        self._end_ranks = end_ranks
        self._cause: str | None = None
        self._decided = threading.Event()
        self._closing = threading.Event()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="neighbours", daemon=True)
        self._thread.start()

    def first_cause(self, own: str) -> str:
        """Tell the others that this node failed, and return why the run really did.

        A lost node shows on the others as a broken connection between ranks, so nobody blames itself before it has
        heard of all nodes once more.

        Args:
            own: What went wrong here.
        """
        since_s = time.monotonic()
        if self._node.rank == 0:
            while not self._decided.is_set() and not self._all_heard_since(since_s):
                self._decided.wait(BEAT_S / 5)
        self.tell(own, SILENCE_S + 2 * BEAT_S)
        return self._cause or own

    def tell(self, cause: str, within_s: float = FAREWELL_S) -> None:
        """Tell the others that this node ends, and why; give node 0 so many seconds to take note."""
        if self._decided.is_set():
            return
        if self._node.rank == 0:
            self._decide(cause)
        else:
            self._send(0, "fault", cause)
            self._decided.wait(within_s)

    def __enter__(self) -> Neighbours:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.tell(f"node {self._node.rank} of {self._node.num_nodes} was ended by {kind.__name__}.")
        self._take_leave()

    def _take_leave(self) -> None:
        """Part without being taken for lost: node 0 goes last, for the others reach each other through it."""
        if self._node.rank == 0:
            deadline = time.monotonic() + FAREWELL_S
            while self._links and time.monotonic() < deadline:
                time.sleep(BEAT_S / 10)
        else:
            self._send(0, "done")
        self._closing.set()
        self._thread.join(timeout=2 * BEAT_S)
        for link in self._links.values():
            link.close()
        self._store = None

    def _watch(self) -> None:
        beat_at_s = time.monotonic()
        while not self._closing.is_set():
            for link in wait(list(self._links.values()), BEAT_S / 2) if self._links else ():
                rank = next(rank for rank, each in self._links.items() if each is link)
                self._hear(rank)
            if time.monotonic() >= beat_at_s:
                beat_at_s = time.monotonic() + BEAT_S
                for rank in list(self._links):
                    self._send(rank, "alive")
            for rank, heard_s in list(self._heard_s.items()):
                if time.monotonic() - heard_s > SILENCE_S:
                    self._lose(rank, f"has shown no life for {SILENCE_S:g} s")
            if not self._links:
                self._closing.wait(BEAT_S / 2)

    def _hear(self, rank: int) -> None:
        try:
            kind, body = receive(self._links[rank])
        except (EOFError, OSError):
            self._lose(rank, "is gone")
            return
        self._heard_s[rank] = time.monotonic()
        if kind == "fault":
            self._decide(body)
        elif kind == "over":
            self._send(rank, "done")
            self._drop(rank)
            self._decide(body)
        elif kind == "done":
            self._drop(rank)

    def _lose(self, rank: int, how: str) -> None:
        self._drop(rank)
        first = rank * self._node.num_ranks
        ranks = [str(each) for each in range(first, first + self._node.num_ranks)]
        self._decide(
            f"node {rank} of {self._node.num_nodes} ({self._hosts[rank]}) {how}, and with it "
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: its launcher was killed, or its machine or the "
            "network was lost."
        )

    def _drop(self, rank: int) -> None:
        del self._heard_s[rank]
        self._links.pop(rank).close()

    def _decide(self, cause: str) -> None:
        """Take `cause` for the run's, unless there is one already; node 0 passes it on."""
        with self._sending:
            is_first = self._cause is None
            if is_first:
                self._cause = cause
        if is_first:
            self._decided.set()
            for rank in list(self._links) if self._node.rank == 0 else ():
                self._send(rank, "over", cause)
            self._end_ranks()

    def _all_heard_since(self, since_s: float) -> bool:
        return all(heard_s > since_s for heard_s in list(self._heard_s.values()))

    def _send(self, rank: int, kind: str, body: str | None = None) -> None:
        # A side that is gone is noticed where it is listened to.
        with self._sending, contextlib.suppress(OSError, KeyError):
            send(self._links[rank], kind, body)
