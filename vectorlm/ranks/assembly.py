"""The launchers of a run's nodes come together before any rank is started."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from vectorlm.errors import LaunchError
from vectorlm.ranks.node import Node

RETRY_S = 0.25
CONNECT_S = 5.0
HELLO_S = 5.0
STORE_S = 60.0
LONGEST_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Assembly:
    """All nodes of a run, ready to start their ranks."""

    links: Mapping[int, Connection]
    """By node: node 0 is connected to each other node, and the others to node 0."""
    hosts: Mapping[int, str]
    """The name of each linked node's machine."""
    run_id: str
    """The run's own name, the same on every node."""
    store_port: int
    """Port of node 0 at which the ranks find their key-value store."""
    store: Any = None
    """On node 0 that store, which must live as long as the run."""


def assemble(node: Node, timeout_s: float) -> Assembly:
    """Wait until every node's launcher is here; node 0 listens and the others come to it.

    Args:
        node: This machine's place.
        timeout_s: The longest wait for the others, in seconds.

    Raises:
        LaunchError: A node is missing (the text says which), node 0 cannot be reached or cannot listen, or this node
            does not fit the run.
    """
    deadline = time.monotonic() + timeout_s
    return _host(node, timeout_s, deadline) if node.rank == 0 else _join(node, timeout_s, deadline)


def send(link: Connection, kind: str, body: Any = None) -> None:
    """Send one message: JSON, for whoever reaches the port must not be able to run code here.

    Raises:
        OSError: The other side is gone.
    """
    link.send_bytes(json.dumps([kind, body]).encode())


def receive(link: Connection) -> tuple[str, Any]:
    """Wait for one message and return its kind and its body.

    Raises:
        EOFError: The other side is gone.
        OSError: The same, or it sent no message of ours.
    """
    try:
        kind, body = json.loads(link.recv_bytes(LONGEST_MESSAGE_BYTES))
    except ValueError as error:
        raise OSError("what came is no message of a vectorlm launcher") from error
    return kind, body


def _host(node: Node, timeout_s: float, deadline: float) -> Assembly:
    links: dict[int, Connection] = {}
    hosts: dict[int, str] = {}
    refusals: list[str] = []
    with _closed_after_error(links.values()), _listen(node) as listener:
        while len(links) < node.num_nodes - 1:
            ready = wait([listener, *links.values()], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise _missing(node, links, refusals, timeout_s)
            for rank in [rank for rank, link in links.items() if link in ready]:
                # Nobody speaks after the hello: that node's launcher was interrupted and may come again.
                links.pop(rank).close()
            if listener in ready:
                _admit(node, listener, links, hosts, refusals)
        store = _open_store(node)
        run_id = uuid.uuid4().hex
        start = {"run_id": run_id, "store_port": store.port, "host": socket.gethostname()}
        for link in links.values():
            send(link, "start", start)
    return Assembly(links, hosts, run_id, store.port, store)


def _open_store(node: Node) -> Any:
    """Open the ranks' key-value store at a free port, where torch's agent in this process will find it."""
    from torch.distributed import DistError, TCPStore

    timeout = timedelta(seconds=STORE_S)
    try:
        return TCPStore(
            node.host, 0, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except DistError as error:
        raise LaunchError(
            f"node 0 cannot reach itself as {node.host!r}, the host of rdzv_endpoint={node.endpoint}: {error}"
        ) from error


def _listen(node: Node) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", node.port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", node.port))
    except OSError as error:
        raise LaunchError(
            f"node 0 cannot listen at rdzv_endpoint={node.endpoint}: {os.strerror(error.errno or 0)}. Name a free "
            "port, the same on every node."
        ) from error


def _admit(
    node: Node,
    listener: socket.socket,
    links: dict[int, Connection],
    hosts: dict[int, str],
    refusals: list[str],
) -> None:
    """Let the node that knocks in, or tell it why not."""
    link = Connection(listener.accept()[0].detach())
    try:
        if not link.poll(HELLO_S):
            raise OSError("it said nothing")
        _, hello = receive(link)
        rank, host = int(hello["node_rank"]), str(hello["host"])
        if problem := _misfit(node, hello, rank, hosts if rank in links else {}):
            refusals.append(problem)
            send(link, "refused", problem)
            link.close()
            return
    except (OSError, EOFError, KeyError, TypeError, ValueError):
        # A port scanner, or a launcher that was interrupted: neither is part of this run.
        link.close()
        return
    links[rank], hosts[rank] = link, host


def _misfit(node: Node, hello: Mapping[str, Any], rank: int, taken: Mapping[int, str]) -> str | None:
    """Say why the node that introduced itself cannot be part of the run; None if it can."""
    for name, ours in (("world_size", node.world_size), ("nnodes", node.num_nodes)):
        if hello[name] != ours:
            return (
                f"node {rank} ({hello['host']}) came with {name}={hello[name]}, and node 0 has {name}={ours}"
            )
    if not 0 < rank < node.num_nodes:
        return f"a second launcher ({hello['host']}) came as node {rank} of {node.num_nodes}"
    if rank in taken:
        return f"two launchers ({taken[rank]} and {hello['host']}) came as node {rank}"
    return None


def _missing(
    node: Node, links: Mapping[int, Connection], refusals: list[str], timeout_s: float
) -> LaunchError:
    absent = [str(rank) for rank in range(1, node.num_nodes) if rank not in links]
    names = f"node {absent[0]}" if len(absent) == 1 else f"nodes {', '.join(absent)}"
    turned_away = f" Turned away: {'; '.join(refusals)}." if refusals else ""
    text = (
        f"{names} of {node.num_nodes} did not come to rdzv_endpoint={node.endpoint} within {timeout_s:g} s."
        f"{turned_away} Start the same command there, with its own node_rank."
    )
    for link in links.values():
        try:
            send(link, "refused", text)
        except OSError:
            continue
    return LaunchError(text)


def _join(node: Node, timeout_s: float, deadline: float) -> Assembly:
    obstacle = "nobody answered"
    while True:
        try:
            return _ask(node, timeout_s, deadline)
        except (OSError, EOFError) as error:
            # Node 0 is not up yet, or still ends the run before this one.
            obstacle = str(error) or "it hung up"
        if time.monotonic() > deadline:
            raise LaunchError(
                f"node {node.rank} of {node.num_nodes} could not reach node 0 at rdzv_endpoint={node.endpoint} within "
                f"{timeout_s:g} s (last try: {obstacle}). Start node 0 on that machine, and name the address under "
                "which the other nodes reach it."
            )
        time.sleep(RETRY_S)


def _ask(node: Node, timeout_s: float, deadline: float) -> Assembly:
    """Introduce this node to node 0 and wait until it starts the run."""
    connection = socket.create_connection((node.host, node.port), timeout=CONNECT_S)
    connection.settimeout(None)
    link = Connection(connection.detach())
    with _closed_after_error([link]):
        hello = {"node_rank": node.rank, "nnodes": node.num_nodes, "world_size": node.world_size}
        send(link, "hello", hello | {"host": socket.gethostname()})
        # Node 0 knows better who is missing: it gets a little longer to say so.
        if not link.poll(max(deadline - time.monotonic(), 0.0) + HELLO_S):
            raise LaunchError(
                f"node 0 at rdzv_endpoint={node.endpoint} let node {node.rank} of {node.num_nodes} wait for more "
                f"than {timeout_s:g} s: other nodes are missing, or something else listens there."
            )
        kind, body = receive(link)
        if kind == "refused":
            raise LaunchError(f"node 0 turned node {node.rank} away: {body}")
    return Assembly({0: link}, {0: body["host"]}, body["run_id"], body["store_port"])


@contextlib.contextmanager
def _closed_after_error(links: Collection[Connection]) -> Iterator[None]:
    """Hang up after an error, Ctrl-C included: a notebook keeps a failed call's variables alive."""
    try:
        yield
    except BaseException:
        for link in links:
            link.close()
        raise
