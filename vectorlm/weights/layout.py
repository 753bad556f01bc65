"""Lay the arena out in the engine's own order, so that a fused parameter can be one view of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vectorlm.weights.plan import Slot, TensorSpec, dtype_of
from vectorlm.weights.record import Copy

ALIGNMENT = 64
"""Every block starts on a cache line, which is also what vector loads want."""


@dataclass(frozen=True)
class Intake:
    """What one worker of the engine takes of the trainer's tensors; a parallel engine has several workers."""

    copies: tuple[Copy, ...]
    """What its loader does with them."""
    dtypes: Mapping[str, str]
    """The dtype of each of its parameters, as torch spells it without the module."""
    sizes: Mapping[str, int]
    """The number of elements of each of its parameters."""


@dataclass(frozen=True)
class Alias:
    """An engine parameter that is one block of the arena."""

    parameter: str
    offset_bytes: int


def place_slots(manifest: Sequence[TensorSpec], intake: Intake) -> tuple[int, tuple[Slot, ...]]:
    """Give every checkpoint tensor a slot; put those that make up one parameter side by side, as they lie in it.

    A slot is always one whole tensor. The parameters of a parallel engine are made of pieces of tensors, which for
    that reason cannot all lie side by side; their tensors lie in the manifest's order.

    Args:
        manifest: What the trainer sends.
        intake: What the engine's first worker takes.

    Returns:
        The arena's size in bytes, and one slot per tensor, in the manifest's order.
    """
    numel = {spec.name: torch.Size(spec.shape).numel() for spec in manifest}
    placed: dict[str, int] = {}
    end = 0
    for name, parts in _by_parameter(intake).items():
        if all(_is_one_run(part, numel[part.source]) and part.source not in placed for part in parts):
            size = dtype_of(intake.dtypes[name]).itemsize
            placed.update({part.source: end + part.parameter_view.offset * size for part in parts})
            end = _aligned(end + intake.sizes[name] * size)
    dtypes = {copy.source: intake.dtypes[copy.parameter] for copy in intake.copies}
    for spec in manifest:
        if spec.name not in placed:
            placed[spec.name] = end
            end = _aligned(end + numel[spec.name] * dtype_of(dtypes[spec.name]).itemsize)
    slots = (Slot(spec.name, spec.shape, dtypes[spec.name], placed[spec.name]) for spec in manifest)
    return max(end, ALIGNMENT), tuple(slots)


def find_aliases(intake: Intake, slots: Sequence[Slot], num_bytes: int) -> list[Alias]:
    """Find the parameters whose bytes lie in the arena just as they lie in the parameter.

    Args:
        intake: What one worker takes.
        slots: Where the tensors lie.
        num_bytes: The arena's size.
    """
    by_name = {slot.name: slot for slot in slots}
    aliases = []
    for name, parts in _by_parameter(intake).items():
        dtype, size = intake.dtypes[name], dtype_of(intake.dtypes[name]).itemsize
        starts = {
            by_name[part.source].offset_bytes + (part.source_view.offset - part.parameter_view.offset) * size
            for part in parts
        }
        start, end = min(starts), min(starts) + intake.sizes[name] * size
        one_block = len(starts) == 1 and start >= 0 and end <= num_bytes
        if not one_block or not all(
            _is_one_run(part) and by_name[part.source].dtype == dtype for part in parts
        ):
            continue
        # Rows that only round a vocabulary up must not reach into a tensor.
        if _overlap(start, end, slots) == sum(part.parameter_view.count for part in parts) * size:
            aliases.append(Alias(name, start))
    return aliases


def _by_parameter(intake: Intake) -> dict[str, list[Copy]]:
    into: dict[str, list[Copy]] = defaultdict(list)
    for copy in intake.copies:
        into[copy.parameter].append(copy)
    return into


def _is_one_run(copy: Copy, whole: int | None = None) -> bool:
    """Whether one run of the source, or all its `whole` elements, becomes one run of the parameter."""
    in_order = copy.source_view.is_whole and copy.parameter_view.is_whole
    return in_order and whole in (None, copy.source_view.count)


def _overlap(start: int, end: int, slots: Iterable[Slot]) -> int:
    """Count the bytes from `start` to `end` that belong to a slot."""
    return sum(
        max(0, min(end, slot.offset_bytes + slot.num_bytes) - max(start, slot.offset_bytes)) for slot in slots
    )


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
