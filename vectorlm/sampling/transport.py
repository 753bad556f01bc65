"""Transports of weights from ranks to engines: pushed through shared memory, in one or several rounds, or pulled."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.contract import WeightSet, WeightSource
from vectorlm.sampling.settings import BUCKET_BYTES, LoraMode
from vectorlm.sampling.weights.arena import MappedArenas
from vectorlm.sampling.weights.exports import Export, ExportedRows
from vectorlm.sampling.weights.lora_source import lora_weight_sets
from vectorlm.sampling.weights.model_tensors import adapter_prefixes, persistent_buffers
from vectorlm.sampling.weights.module_source import ModuleSource
from vectorlm.sampling.weights.plan import BASE, Layout

FOREIGN = "the weights come from your own WeightSource, and engines can pull only from modules"
EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


class Push:
    """A transport through a file that engines map: every rank writes its rows, in rounds if the file is small."""

    def __init__(self, arenas: MappedArenas, arena_bytes: int | None) -> None:
        """Write through `arenas`, into at most `arena_bytes` at a time; None for the whole weight set."""
        self.name = "push" if arena_bytes is None else "bucketed"
        self.arena_bytes = arena_bytes
        self._arenas = arenas

    def is_current(self, weight_set: WeightSet) -> bool:
        """Return True: arenas stay."""
        return True

    def open(self, weight_set: WeightSet, layout: Layout) -> Sequence[Export]:
        """Map the arena; a user's source maps it by itself."""
        if isinstance(weight_set.source, ModuleSource):
            self._arenas.slots_of(layout)
        return ()

    def publish(self, weight_set: WeightSet, layout: Layout, with_checksums: bool) -> Sequence[int]:
        """Write the rows, in the engine's dtype."""
        return weight_set.source.publish(layout, with_checksums)


class Pull:
    """A transport by memory handles: every rank exports its rows once, and engines copy from them at each update."""

    name = "pull"
    arena_bytes = 0

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._exported: dict[str, ExportedRows] = {}

    def is_current(self, weight_set: WeightSet) -> bool:
        """Return whether the exported memory still holds the rows."""
        exported = self._exported.get(weight_set.name)
        return exported is not None and exported.are_current(_source(weight_set).writes)

    def open(self, weight_set: WeightSet, layout: Layout) -> Sequence[Export]:
        """Export the rows; the memory of earlier exports may then be freed."""
        self._exported[weight_set.name] = exported = ExportedRows(_source(weight_set).writes, layout)
        return exported.exports

    def publish(self, weight_set: WeightSet, layout: Layout, with_checksums: bool) -> Sequence[int]:
        """Compute the rows that are not stored as such, and wait for the device, because another process reads next."""
        sums = self._exported[weight_set.name].publish(_source(weight_set), layout, with_checksums)
        if self._topology.is_cuda:
            torch.cuda.synchronize(self._topology.device)
        return sums


Transport = Push | Pull
"""A rank's part in sending weight sets; `vectorlm.sampling.hot_swap.HotSwap` makes the calls on all ranks."""


def weight_sets_of(
    model: Any, topology: Topology, arenas: MappedArenas, lora_mode: LoraMode
) -> Sequence[WeightSet]:
    """Return the weight sets of `model`; their sources check that this rank can send its shards."""
    if isinstance(model, WeightSource):
        return [WeightSet(BASE, model)]
    if adapter_prefixes(model):
        return lora_weight_sets(model, topology, arenas, lora_mode)
    return [WeightSet(BASE, ModuleSource(model, topology, arenas))]


def changes_of(model: Any) -> dict[int, int]:
    """Return a number per tensor that grows with every in-place change; empty if `model` is not a module."""
    tensors = list(getattr(model, "parameters", list)())
    tensors += persistent_buffers(model).values() if hasattr(model, "named_modules") else ()
    # An operation on a DTensor counts only there, and one on its local shard only on the shard.
    return {
        id(tensor): tensor._version + getattr(tensor, "_local_tensor", tensor)._version for tensor in tensors
    }


def open_transport(
    setting: str,
    offered: Sequence[str],
    obstacles: Sequence[str | None],
    topology: Topology,
    arenas: MappedArenas,
) -> Transport:
    """Return this rank's transport; `obstacles` holds the result of `pull_obstacle` on each rank.

    On CUDA `auto` pulls, or else pushes in rounds. On CPU, where an engine may compute with the arena itself, it pushes
    in one round. Raises `ConfigError` if `setting` is impossible; the text says why.
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
    """Return why the engines cannot pull from this rank; None if they can."""
    if "pull" not in offered:
        return "the engine does not offer it"
    if not all(isinstance(weight_set.source, ModuleSource) for weight_set in weight_sets):
        return FOREIGN
    rows = [
        write.rows
        for weight_set in weight_sets
        for boxes in _source(weight_set).writes.values()
        for write in boxes
    ]
    if any(tensor.dtype == torch.uint8 for tensor in rows):
        return "the trainer stores its weights quantised, and the engine needs them dequantised"
    if not topology.is_cuda:
        return None
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if EXPANDABLE.search(os.environ.get(variable, "")):
            return f"{variable} sets expandable_segments, whose memory has no handles; remove that option"
    if not all(tensor.is_cuda for tensor in rows):
        return "the trainer keeps weights on the host (CPUOffloadPolicy)"
    here = torch.device(topology.device).index
    # The ranks of this node use the first devices; further visible devices read nothing. A rank may see only its own.
    num_devices = min(topology.local_world_size, torch.cuda.device_count())
    others = [index for index in range(num_devices) if index != here]
    if far := [index for index in others if not torch.cuda.can_device_access_peer(index, here)]:
        return f"device {far[0]} cannot reach device {here}"
    return None


def _source(weight_set: WeightSet) -> ModuleSource:
    if not isinstance(weight_set.source, ModuleSource):
        raise ConfigError(f"the engine pulls, but {FOREIGN}. Build the engine with transport='push'.")
    return weight_set.source
