"""The trainer's side of a hot swap: every rank writes its own shard, and nothing is gathered."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vectorlm.errors import WeightMismatch
from vectorlm.ranks.topology import Topology
from vectorlm.weights.arena import Arena
from vectorlm.weights.checksum import checksum
from vectorlm.weights.plan import Layout
from vectorlm.weights.source import Change, SourcesOf, base_sources


@dataclass(frozen=True)
class Share:
    """What one rank publishes of one parameter."""

    target: torch.Tensor
    """The rows' place in the arena, in the engine's dtype."""
    rows: torch.Tensor
    """The rows of this rank's shard."""
    first_row: int
    """Where the rows start in the whole tensor."""
    word_bytes: int
    """Size of the words that its checksum adds."""
    change: Change | None = None
    """What becomes of the rows while they are written."""


class Publisher:
    """Writes one rank's share of the model into the arena."""

    def __init__(self, layout: Layout, topology: Topology, sources_of: SourcesOf = base_sources) -> None:
        self._topology = topology
        self._sources_of = sources_of
        self._arena = Arena.open(layout.path, layout.num_bytes)
        self.num_bytes = sum(slot.num_bytes for slot in layout.slots)
        """Bytes of weights that one update replaces."""
        self.num_copied_bytes = layout.num_copied_bytes
        """Bytes of these that the engine copies once more."""
        self.swapped: tuple[str, ...] = ("base",)
        """What an update replaces."""
        self._shapes = {slot.name: slot.shape for slot in layout.slots}
        self._slots = {slot.name: self._arena.view(slot) for slot in layout.slots}
        self._word_bytes = {slot.name: slot.word_bytes for slot in layout.slots}

    def shares(self, model: torch.nn.Module) -> list[Share]:
        """Work out what this rank publishes of `model`; nothing is written yet.

        Args:
            model: The trainer's model, sharded or not.

        Returns:
            One share per parameter, in the layout's order.

        Raises:
            WeightMismatch: The model is not the one that the layout was made for, or is sharded in an unknown way.
        """
        sources = self._sources_of(model, self._topology)
        shapes = {name: tuple(source.tensor.shape) for name, source in sources.items()}
        if shapes != self._shapes:
            raise WeightMismatch(_difference(shapes, self._shapes))
        shares = []
        for name, slot in self._slots.items():
            rows, first_row = owned_rows(sources[name].tensor, self._topology)
            table = slot.reshape(1) if slot.ndim == 0 else slot
            target = table[first_row : first_row + len(rows)]
            shares.append(Share(target, rows, first_row, self._word_bytes[name], sources[name].change))
        return shares

    def write(self, shares: Sequence[Share], with_checksums: bool = False) -> list[int]:
        """Copy `shares` into the arena, cast to the engine's dtype.

        Args:
            shares: From `shares`.
            with_checksums: Whether to sum the rows too, while they are in the cache.

        Returns:
            The checksum of each share, if asked for; else nothing.
        """
        sums = []
        for share in shares:
            rows = share.rows if share.change is None else share.change(share.rows)
            rows = rows.to(share.target.dtype)
            share.target.copy_(rows)
            if with_checksums:
                sums.append(checksum(rows, share.first_row, share.word_bytes))
        if self._topology.is_cuda:
            torch.cuda.synchronize(self._topology.device)
        return sums

    def close(self) -> None:
        """Let go of the arena."""
        self._slots.clear()
        self._arena.close()


def owned_rows(parameter: torch.Tensor, topology: Topology) -> tuple[torch.Tensor, int]:
    """Return the rows of `parameter` that this rank publishes, and where they start in the whole tensor.

    A shard is published by the rank that holds it. Where ranks of one node hold the same rows (no sharding, or
    replicas), each takes an equal part, so no byte is written twice.

    Args:
        parameter: A plain tensor, or a DTensor sharded along dimension 0.
        topology: This rank's place in the run.

    Raises:
        WeightMismatch: The tensor is sharded along another dimension, or over several nodes: the ranks of each node
            must hold the whole of it between them, for they fill that node's engine.
    """
    if isinstance(parameter, DTensor):
        place = _shard_place(parameter.shape, parameter.device_mesh, parameter.placements, topology)
        return _part(parameter.to_local().detach(), *place)
    return _part(parameter.detach(), 0, topology.local_rank, topology.local_world_size)


# A model has few distinct shapes, and this arithmetic would cost as much as copying the weights.
@functools.lru_cache(maxsize=4096)
def _shard_place(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], topology: Topology
) -> tuple[int, int, int]:
    """Return where this rank's shard starts, its index among the near ranks that hold the same, and their number."""
    if not all(isinstance(each, Replicate) or each == Shard(0) for each in placements):
        raise WeightMismatch(
            f"a parameter is placed as {placements}: only shards along dimension 0 can be published."
        )
    _require_whole_on_node(mesh, placements, topology)
    _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    place = tuple(
        slice(None) if isinstance(placement, Replicate) else index
        for placement, index in zip(placements, coordinate, strict=True)
    )
    holders = mesh.mesh[place].reshape(-1).tolist()
    near = [rank for rank in holders if rank // topology.local_world_size == topology.node]
    return offset[0] if offset else 0, near.index(topology.rank), len(near)


def _require_whole_on_node(mesh: DeviceMesh, placements: tuple[Placement, ...], topology: Topology) -> None:
    sharded = [dim for dim, placement in enumerate(placements) if isinstance(placement, Shard)]
    num_shards = math.prod(mesh.size(dim) for dim in sharded)
    on_this_node = mesh.mesh // topology.local_world_size == topology.node
    here = {tuple(place[dim] for dim in sharded) for place in on_this_node.nonzero().tolist()}
    if len(here) < num_shards:
        raise WeightMismatch(
            f"node {topology.node} holds {len(here)} of the {num_shards} shards of a parameter, and its engine needs "
            f"all: a run with engines on {topology.num_nodes} nodes needs sharding_strategy=HYBRID_SHARD (shards "
            "within each node, replicas over nodes) or NO_SHARD."
        )


def _part(rows: torch.Tensor, first_row: int, index: int, count: int) -> tuple[torch.Tensor, int]:
    if rows.ndim == 0:
        rows = rows.reshape(1)
    size = -(-len(rows) // count)
    start = min(index * size, len(rows))
    return rows[start : start + size], first_row + start


def _difference(sent: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> str:
    missing = [name for name in expected if name not in sent]
    surplus = [name for name in sent if name not in expected]
    reshaped = [
        f"{name} {sent[name]} for {expected[name]}"
        for name in sent
        if expected.get(name, sent[name]) != sent[name]
    ]
    return (
        f"the trainer sends {len(sent)} tensors, the engine was connected for {len(expected)}; "
        f"missing: {missing}; unexpected: {surplus}; other shapes: {reshaped}."
    )
