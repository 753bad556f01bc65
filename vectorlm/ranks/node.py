"""Which node of a run this machine is, and where its nodes meet."""

from __future__ import annotations

from dataclasses import dataclass

from vectorlm.errors import LaunchError

DEFAULT_PORT = 29400
"""Port of an endpoint that names none; torchrun's own."""


@dataclass(frozen=True)
class Node:
    """One machine of a run; a run on one machine is node 0 of 1."""

    rank: int
    """Index of this node, from 0."""
    num_nodes: int
    """Number of nodes in the run."""
    num_ranks: int
    """Number of ranks on each node."""
    host: str
    """Name or address of node 0, as the other nodes reach it."""
    port: int
    """Port of node 0 that the launchers of the other nodes connect to."""

    @classmethod
    def of(cls, world_size: int, nnodes: int, node_rank: int, rdzv_endpoint: str | None) -> Node:
        """Check the arguments of `vectorlm.launch` and return the node that they describe.

        Args:
            world_size: Number of ranks on all nodes together.
            nnodes: Number of nodes.
            node_rank: Index of this node, from 0.
            rdzv_endpoint: Node 0 as ``host:port``; needed from two nodes on.

        Raises:
            LaunchError: An argument is impossible, or they do not fit together.
        """
        if world_size < 1:
            raise LaunchError(f"world_size={world_size} cannot run: it must be at least 1.")
        if nnodes < 1:
            raise LaunchError(f"nnodes={nnodes} cannot run: it must be at least 1.")
        if world_size % nnodes:
            below = world_size - world_size % nnodes
            raise LaunchError(
                f"world_size={world_size} cannot be spread over nnodes={nnodes}: it counts the ranks of all nodes, "
                f"and each node runs as many. Use {below + nnodes}{f' or {below}' if below else ''}."
            )
        if not 0 <= node_rank < nnodes:
            raise LaunchError(
                f"node_rank={node_rank} is not a node of nnodes={nnodes}: it must be 0 to {nnodes - 1}."
            )
        if nnodes > 1 and not rdzv_endpoint:
            raise LaunchError(
                f"nnodes={nnodes} needs rdzv_endpoint: the address of node 0 as host:port, the same on every node."
            )
        host, port = _split(rdzv_endpoint or f"127.0.0.1:{DEFAULT_PORT}")
        return cls(node_rank, nnodes, world_size // nnodes, host, port)

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes together."""
        return self.num_nodes * self.num_ranks

    @property
    def endpoint(self) -> str:
        """Where the launchers meet, as ``host:port``."""
        return join_address(self.host, self.port)


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``host``, ``host:port``, or the same with an IPv6 address in brackets."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(DEFAULT_PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise LaunchError(
            f"rdzv_endpoint={endpoint!r} is not an address: it must be host:port, with a port from 1 to 65535. "
            f"Use node-0:{DEFAULT_PORT}, for example."
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
