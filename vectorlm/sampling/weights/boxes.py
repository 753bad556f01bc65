"""The boxes of a whole tensor that a rank's shard consists of, for any placement of a DTensor."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from vectorlm.errors import WeightMismatch


@dataclass(frozen=True)
class Box:
    """A part of a shard that is one block of the whole tensor."""

    starts: tuple[int, ...]
    """Index of its first element in the shard, by dimension."""
    place: tuple[int, ...]
    """Index of its first element in the whole tensor, by dimension."""
    lengths: tuple[int, ...]

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the view of the shard that is this box."""
        for dim, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            if length != shard.shape[dim]:
                shard = shard.narrow(dim, start, length)
        return shard


# Cached: this arithmetic costs as much as copying the weights, and a model has few distinct shapes.
@functools.lru_cache(maxsize=4096)
def boxes_of(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[Box, ...]:
    """Return the boxes of this rank's shard of a tensor; their order is the order in the shard.

    Tensor parallelism cuts columns. If it cuts a matrix of several parts, such as gate and up of experts, a shard has a
    box in each.

    Raises:
        WeightMismatch: A placement is neither a shard nor a replica.
    """
    if others := [place for place in placements if not isinstance(place, Shard | Replicate | _StridedShard)]:
        raise WeightMismatch(
            f"a parameter has the placement {others[0]}: each must be a shard or a replica. Reduce it first."
        )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    lines = [torch.arange(size) for size in shape]
    for dim, place in enumerate(placements):
        if isinstance(place, Shard | _StridedShard):
            parts: Sequence[torch.Tensor] = [lines[place.dim]]
            if isinstance(place, _StridedShard):
                parts = parts[0].chunk(int(place.split_factor))
            lines[place.dim] = torch.cat([_chunk(part, mesh.size(dim), coordinate[dim]) for part in parts])
    if not shape:
        return (Box((), (), ()),)
    runs_by_dim = [_runs(line, size) for line, size in zip(lines, shape, strict=True)]
    return tuple(Box(*map(tuple, zip(*runs, strict=True))) for runs in itertools.product(*runs_by_dim))


def _chunk(line: torch.Tensor, num: int, index: int) -> torch.Tensor:
    parts = line.chunk(num)
    return parts[index] if index < len(parts) else line[:0]


def _runs(line: torch.Tensor, size: int) -> list[tuple[int, int, int]]:
    """Cut the indices of a shard along one dimension into runs: start in the shard, start in the whole, length.

    An empty shard starts behind the last index, where no other shard starts.
    """
    if not len(line):
        return [(0, size, 0)]
    breaks = (torch.nonzero(line.diff() != 1)[:, 0] + 1).tolist()
    return [
        (start, int(line[start]), end - start) for start, end in itertools.pairwise([0, *breaks, len(line)])
    ]


@functools.lru_cache(maxsize=4096)
def uncut(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> int:
    """Return a number of elements; ranks cut the rows of dimension 0 only at multiples of it."""
    pieces: dict[int, int] = defaultdict(lambda: 1)
    for dim, place in enumerate(placements):
        if isinstance(place, Shard | _StridedShard):
            pieces[place.dim] *= mesh.size(dim) * int(getattr(place, "split_factor", 1))
    length = math.prod(shape[1:])
    for dim, num in pieces.items():
        if dim > 0 and num > 1:
            step = shape[dim] // num if shape[dim] % num == 0 else 1
            length = math.gcd(length, step * math.prod(shape[dim + 1 :]))
    return length


@functools.lru_cache(maxsize=4096)
def ranks_by_shard(
    mesh: DeviceMesh, placements: tuple[Placement, ...], world_size: int
) -> Mapping[tuple[int, ...], Sequence[int]]:
    """Return the ranks that hold each shard of a tensor, by the shard's coordinates.

    If a tensor-parallel group does not split a weight, FSDP shards it over a mesh with one rank of each group. The
    other ranks hold the same shards on other meshes.
    """
    sharded = [dim for dim, place in enumerate(placements) if not isinstance(place, Replicate)]
    holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    seen: set[int] = set()
    offsets = mesh.mesh - mesh.mesh.min()
    for rank in range(max(world_size, int(mesh.mesh.max()) + 1)):
        if rank in seen:
            continue
        ranks = mesh.mesh if rank in mesh.mesh else offsets + rank
        seen.update(ranks.flatten().tolist())
        for place in torch.ones_like(ranks).nonzero().tolist():
            holders[tuple(place[dim] for dim in sharded)].append(int(ranks[tuple(place)]))
    return holders


def own_shard(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """Return the coordinates of this rank's shard, as `ranks_by_shard` has them."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return tuple(coordinate[dim] for dim, place in enumerate(placements) if not isinstance(place, Replicate))
