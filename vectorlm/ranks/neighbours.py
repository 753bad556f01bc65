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
FAREWELL_S = 10.0
"""How long node 0 waits for the others to end their ranks."""


class Neighbours:
    """Tells the other nodes why this one ends, and ends this one when another does.

    Node 0 decides for everybody what the cause was: a node that is lost, else what it was told first. Launchers are
    connected to node 0 only, and show each other life twice a second.
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
        self._suspicion: tuple[int, str, float] | None = None
        self._decided = threading.Event()
        self._closing = threading.Event()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="neighbours", daemon=True)
        self._thread.start()

    def first_cause(self, own: str) -> str:
        """Tell the others that this node ends, and return why the run really does.

        Args:
            own: What happened here; it is the cause unless another node was first.
        """
        if self._node.rank == 0:
            self._suspect(0, own)
        else:
            self._send(0, "fault", own)
        self._decided.wait(SILENCE_S + FAREWELL_S)
        return self._cause or own

    def __enter__(self) -> Neighbours:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.first_cause(
                f"node {self._node.rank} of {self._node.num_nodes} was ended by {kind.__name__}."
            )
        self._take_leave()

    def _take_leave(self) -> None:
        """Part without being taken for lost; node 0 goes last, for it holds the store that all ranks talk to."""
        if self._node.rank == 0:
            deadline = time.monotonic() + FAREWELL_S
            while self._links and time.monotonic() < deadline:
                time.sleep(BEAT_S / 10)
        self._closing.set()
        if self._node.rank != 0:
            self._send(0, "done")
        self._thread.join(timeout=2 * BEAT_S)
        for link in self._links.values():
            link.close()
        self._store = None

    def _watch(self) -> None:
        beat_at_s = time.monotonic()
        while not self._closing.is_set():
            for link in wait(list(self._links.values()), BEAT_S / 2) if self._links else ():
                rank = next(rank for rank, each in self._links.items() if each is link)
                # To the end: behind an old sign of life may lie the end of the connection.
                while rank in self._links and self._links[rank].poll():
                    self._hear(rank)
            if time.monotonic() >= beat_at_s:
                beat_at_s = time.monotonic() + BEAT_S
                for rank in list(self._links):
                    self._send(rank, "alive")
            for rank, heard_s in list(self._heard_s.items()):
                if time.monotonic() - heard_s > SILENCE_S:
                    self._lose(rank, f"has shown no life for {SILENCE_S:g} s")
            self._judge()
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
            self._suspect(rank, body)
        elif kind == "over":
            self._decide(body)
        elif kind == "done":
            self._drop(rank)

    def _lose(self, rank: int, how: str) -> None:
        self._drop(rank)
        if self._closing.is_set():
            return
        if self._suspicion is not None and self._suspicion[0] == rank:
            # It said why before it left.
            self._decide(self._suspicion[1])
            return
        first = rank * self._node.num_ranks
        ranks = [str(each) for each in range(first, first + self._node.num_ranks)]
        self._decide(
            f"node {rank} of {self._node.num_nodes} ({self._hosts[rank]}) {how}, and with it "
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: its launcher was killed, or its machine or the "
            "network was lost."
        )

    def _suspect(self, rank: int, cause: str) -> None:
        """On node 0, note what node `rank` reported first, until it is known whether another node was lost."""
        if self._suspicion is None:
            self._suspicion = (rank, cause, time.monotonic())

    def _judge(self) -> None:
        """Let the suspicion stand once all nodes were heard of after it.

        A node that is lost shows on the others as a broken connection between ranks, which is not the cause.
        """
        if self._suspicion is not None and not self._decided.is_set():
            _, cause, since_s = self._suspicion
            if all(heard_s > since_s for heard_s in self._heard_s.values()):
                self._decide(cause)

    def _drop(self, rank: int) -> None:
        del self._heard_s[rank]
        self._links.pop(rank).close()

    def _decide(self, cause: str) -> None:
        """Take `cause` for the run's, unless there is one already; node 0 passes it on."""
        if self._cause is None:
            self._cause = cause
            for rank in list(self._links) if self._node.rank == 0 else ():
                self._send(rank, "over", cause)
            self._end_ranks()
            self._decided.set()

    def _send(self, rank: int, kind: str, body: str | None = None) -> None:
        # A side that is gone is noticed where it is listened to.
        with self._sending, contextlib.suppress(OSError, KeyError):
            send(self._links[rank], kind, body)
