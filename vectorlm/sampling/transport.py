"""How weights get from the ranks into the engines: pushed through shared memory, in one round or several, or pulled."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch

from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.contract import WeightSet
from vectorlm.sampling.settings import BUCKET_BYTES
from vectorlm.sampling.weights.arena import MappedArenas
from vectorlm.sampling.weights.exports import Export, ExportedRows
from vectorlm.sampling.weights.module_source import ModuleSource
from vectorlm.sampling.weights.plan import Layout

FOREIGN = "the weights come from a WeightSource of your own, and only modules can be pulled from"
EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


class Push:
    """Every rank writes its rows into an arena that engines map; a small arena is filled in rounds."""

    def __init__(self, arenas: MappedArenas, arena_bytes: int | None) -> None:
        """Write through `arenas`, into at most `arena_bytes` at a time; None for all that a weight set needs."""
        self.name = "push" if arena_bytes is None else "bucketed"
        self.arena_bytes = arena_bytes
        self._arenas = arenas

    def is_current(self, weight_set: WeightSet) -> bool:
        """Return True: arenas stay."""
        return True

    def open(self, weight_set: WeightSet, layout: Layout) -> Sequence[Export]:
        """Map the arena; other sources map it themselves."""
        if isinstance(weight_set.source, ModuleSource):
            self._arenas.slots_of(layout)
        return ()

    def publish(self, weight_set: WeightSet, layout: Layout, with_checksums: bool) -> Sequence[int]:
        """Write the rows, in the engine's dtype."""
        return weight_set.source.publish(layout, with_checksums)


class Pull:
    """Every rank exports its rows once, where they lie; at each update the engines copy them into their parameters."""

    name = "pull"
    arena_bytes = 0

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._exported: dict[str, ExportedRows] = {}

    def is_current(self, weight_set: WeightSet) -> bool:
        """Whether the rows still lie where they were exported."""
        exported = self._exported.get(weight_set.name)
        return exported is not None and exported.are_current(_source(weight_set).writes)

    def open(self, weight_set: WeightSet, layout: Layout) -> Sequence[Export]:
        """Export the rows; what was exported before may then be freed."""
        self._exported[weight_set.name] = exported = ExportedRows(_source(weight_set).writes, layout)
        return exported.exports

    def publish(self, weight_set: WeightSet, layout: Layout, with_checksums: bool) -> Sequence[int]:
        """Compute what has to be computed, and wait for the device: the engine reads next, in another process."""
        sums = self._exported[weight_set.name].publish(_source(weight_set), layout, with_checksums)
        if self._topology.is_cuda:
            torch.cuda.synchronize(self._topology.device)
        return sums


Transport = Push | Pull
"""One rank's part in sending weight sets; `vectorlm.sampling.hot_swap.HotSwap` makes the calls on all ranks."""


def open_transport(
    setting: str,
    offered: Sequence[str],
    obstacles: Sequence[str | None],
    topology: Topology,
    arenas: MappedArenas,
) -> Transport:
    """Resolve `auto`, given what engines offer and what `pull_obstacle` says on each rank; make this rank's transport.

    On CUDA `auto` pulls, or pushes in rounds. On CPU, where an engine may compute with the arena itself, it pushes at
    once. Raises `ConfigError` where `setting` is impossible; the text says why.
    """
    obstacle = next(filter(None, obstacles), None)
    if setting == "auto" and topology.is_cuda:
        rounds = "bucketed" if "bucketed" in offered else "push"
        setting = "pull" if obstacle is None else rounds
    if setting == "pull":
        if obstacle is not None:
            raise ConfigError(f"transport='pull' cannot be used: {obstacle}. Use transport='auto'.")
        return Pull(topology)
    if setting == "bucketed" and setting not in offered:
        raise ConfigError(
            "transport='bucketed' cannot be used: the engine does not offer it. Use transport='push'."
        )
    return Push(arenas, BUCKET_BYTES if setting == "bucketed" else None)


def pull_obstacle(weight_sets: Sequence[WeightSet], offered: Sequence[str], topology: Topology) -> str | None:
    """Say why the engines cannot pull from this rank, if they cannot."""
    if "pull" not in offered:
        return "the engine does not offer it"
    sources = [each.source for each in weight_sets]
    if not all(isinstance(source, ModuleSource) for source in sources):
        return FOREIGN
    if any(
        write.rows.dtype == torch.uint8 for each in weight_sets for write in _source(each).writes.values()
    ):
        return "the trainer holds no memory of its quantised weights as the engine takes them"
    if not topology.is_cuda:
        return None
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if EXPANDABLE.search(os.environ.get(variable, "")):
            return f"{variable} sets expandable_segments, whose memory has no handles; leave that out"
    if any(not write.rows.is_cuda for each in weight_sets for write in _source(each).writes.values()):
        return "the trainer keeps weights on the host (CPUOffloadPolicy)"
    here = torch.device(topology.device).index
    # A rank for each of the first devices; others that it sees read nothing.
    others = [index for index in range(topology.local_world_size) if index != here]
    if far := [index for index in others if not torch.cuda.can_device_access_peer(index, here)]:
        return f"device {far[0]} cannot reach device {here}"
    return None


def _source(weight_set: WeightSet) -> ModuleSource:
    if not isinstance(weight_set.source, ModuleSource):
        raise ConfigError(f"the engine pulls, but {FOREIGN}. Build the engine with transport='push'.")
    return weight_set.source
