"""Lay the arena out in the engine's own order, so that a fused parameter can be one view of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vectorlm.weights.plan import Slot, TensorSpec, dtype_name
from vectorlm.weights.record import Copy

ALIGNMENT = 64
"""Every block starts on a cache line, which is also what vector loads want."""


@dataclass(frozen=True)
class Alias:
    """An engine parameter that is one block of the arena."""

    parameter: str
    offset_bytes: int


@dataclass(frozen=True)
class ArenaPlan:
    """The arena as the engine wants it."""

    num_bytes: int
    slots: tuple[Slot, ...]
    """One per checkpoint tensor, in the trainer's order."""
    aliases: tuple[Alias, ...]
    """Parameters that need no copy once they are views of the arena."""
    copies: tuple[Copy, ...]
    """What remains to be copied out of the arena at each update."""


def plan_arena(
    manifest: Sequence[TensorSpec],
    copies: Sequence[Copy],
    parameters: Mapping[str, torch.Tensor],
    *,
    alias: bool,
) -> ArenaPlan:
    """Give every checkpoint tensor a slot; put those that make up one parameter side by side, as they lie in it.

    Args:
        manifest: What the trainer sends.
        copies: What the engine's loader does with it.
        parameters: The engine's parameters by name.
        alias: Whether parameters may become views of the arena (the engine computes in host memory).
    """
    into: dict[str, list[Copy]] = defaultdict(list)
    for copy in copies:
        into[copy.parameter].append(copy)
    placed: dict[str, int] = {}
    aliases, end = [], 0
    for name, parts in into.items():
        parameter = parameters[name]
        fits = all(_fills_one_run(part) and part.source not in placed for part in parts)
        if alias and fits and parameter.is_contiguous():
            aliases.append(Alias(name, end))
            size = parameter.element_size()
            placed.update({part.source: end + part.parameter_view.offset * size for part in parts})
            end = _aligned(end + parameter.numel() * size)
    target = {copy.source: parameters[copy.parameter] for copy in copies}
    for spec in manifest:
        if spec.name not in placed:
            placed[spec.name] = end
            end = _aligned(end + torch.Size(spec.shape).numel() * target[spec.name].element_size())
    slots = [
        Slot(spec.name, spec.shape, dtype_name(target[spec.name].dtype), placed[spec.name])
        for spec in manifest
    ]
    aliased = {each.parameter for each in aliases}
    rest = [copy for copy in copies if copy.parameter not in aliased]
    return ArenaPlan(max(end, ALIGNMENT), tuple(slots), tuple(aliases), tuple(rest))


def _fills_one_run(copy: Copy) -> bool:
    return copy.source_view.offset == 0 and copy.source_view.is_whole and copy.parameter_view.is_whole


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
