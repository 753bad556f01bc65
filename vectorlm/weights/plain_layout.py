"""Tensors laid out one behind the other, for engines that copy them out of the arena."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vectorlm.weights.layout import ALIGNMENT
from vectorlm.weights.plan import Slot, TensorSpec, dtype_of

MAX_WORD_BYTES = 8


def plain_slots(
    manifest: Sequence[TensorSpec], dtype_of_tensor: Callable[[str], str]
) -> tuple[int, tuple[Slot, ...]]:
    """Give every tensor of `manifest` a slot of its own, in the manifest's order.

    Args:
        manifest: What the trainer sends.
        dtype_of_tensor: The dtype that the engine wants a tensor in, by its name; as torch spells it.

    Returns:
        The arena's size in bytes, and the slots.
    """
    slots, end = [], 0
    for spec in manifest:
        dtype = dtype_of_tensor(spec.name)
        # Checksums add words so narrow that no row is cut: shards end between rows.
        row_bytes = math.prod(spec.shape[1:]) * dtype_of(dtype).itemsize
        slot = Slot(spec.name, tuple(spec.shape), dtype, end, math.gcd(MAX_WORD_BYTES, row_bytes))
        slots.append(slot)
        end += -(-slot.num_bytes // ALIGNMENT) * ALIGNMENT
    return max(end, ALIGNMENT), tuple(slots)
