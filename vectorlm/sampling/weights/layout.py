"""Lay the arena out in the engine's own order, so that a fused parameter can be one view of it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch

from vectorlm.sampling.weights.plan import Slot, TensorSpec, dtype_of
from vectorlm.sampling.weights.record import Copy, LoadPlan

ALIGNMENT = 64
"""Every block starts on a cache line, which is also what vector loads want."""


def place_slots(manifest: Sequence[TensorSpec], load_plan: LoadPlan) -> tuple[int, tuple[Slot, ...]]:
    """Give every tensor a slot; put those that make up one parameter side by side, as they lie in it.

    A slot is always one whole tensor. The parameters of a parallel engine are made of pieces of tensors, which cannot
    all lie side by side; their tensors lie in the manifest's order. `load_plan` is the first worker's.

    Returns:
        The arena's size in bytes, and one slot per tensor, in the manifest's order.
    """
    numel = {spec.name: torch.Size(spec.shape).numel() for spec in manifest}
    placed: dict[str, int] = {}
    end = 0
    for name, parts in _by_parameter(load_plan).items():
        if all(_is_one_run(part, numel[part.source]) and part.source not in placed for part in parts):
            size = dtype_of(load_plan.dtypes[name]).itemsize
            placed.update({part.source: end + part.parameter_view.offset * size for part in parts})
            end = _aligned(end + load_plan.sizes[name] * size)
    dtypes = {copy.source: load_plan.dtypes[copy.parameter] for copy in load_plan.copies}
    for spec in manifest:
        if spec.name not in placed:
            placed[spec.name] = end
            end = _aligned(end + numel[spec.name] * dtype_of(dtypes[spec.name]).itemsize)
    slots = (Slot(spec.name, spec.shape, dtypes[spec.name], placed[spec.name]) for spec in manifest)
    return max(end, ALIGNMENT), tuple(slots)


def in_rounds(slots: Sequence[Slot], max_bytes: int) -> tuple[int, tuple[Slot, ...]]:
    """Let `slots` share an arena of `max_bytes`, or of the largest one, that is filled several times.

    Returns:
        The arena's size in bytes, and the slots in their order.
    """
    placed, number, end, num_bytes = [], 0, 0, ALIGNMENT
    for slot in slots:
        if end and end + slot.num_bytes > max_bytes:
            number, end = number + 1, 0
        placed.append(dataclasses.replace(slot, offset_bytes=end, round=number))
        end = _aligned(end + slot.num_bytes)
        num_bytes = max(num_bytes, end)
    return num_bytes, tuple(placed)


def plain_slots(
    manifest: Sequence[TensorSpec], dtype_of_tensor: Callable[[str], str]
) -> tuple[int, tuple[Slot, ...]]:
    """Lay tensors out one behind the other, for engines that copy them out of the arena; returns as `place_slots`.

    `dtype_of_tensor` says which dtype the engine wants a tensor in, by its name; as torch spells it.
    """
    return place_slots(manifest, LoadPlan.whole(manifest, dtype_of_tensor))


def find_aliases(load_plan: LoadPlan, slots: Sequence[Slot], num_bytes: int) -> dict[str, int]:
    """Find one worker's parameters that are one block of the arena, of `num_bytes`; return where they begin in it."""
    by_name = {slot.name: slot for slot in slots}
    aliases = {}
    for name, parts in _by_parameter(load_plan).items():
        dtype, size = load_plan.dtypes[name], dtype_of(load_plan.dtypes[name]).itemsize
        starts = {
            by_name[part.source].offset_bytes + (part.source_view.offset - part.parameter_view.offset) * size
            for part in parts
        }
        start, end = min(starts), min(starts) + load_plan.sizes[name] * size
        one_block = len(starts) == 1 and start >= 0 and end <= num_bytes
        if not one_block or not all(
            _is_one_run(part) and by_name[part.source].dtype == dtype for part in parts
        ):
            continue
        # Rows that only round a vocabulary up must not reach into a tensor.
        if _overlap(start, end, slots) == sum(part.parameter_view.count for part in parts) * size:
            aliases[name] = start
    return aliases


def _by_parameter(load_plan: LoadPlan) -> dict[str, list[Copy]]:
    into: dict[str, list[Copy]] = defaultdict(list)
    for copy in load_plan.copies:
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
