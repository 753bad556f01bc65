"""What `receiver: auto` means on CPU."""

from __future__ import annotations

PACKED_FROM_PARAMETERS = 4_000_000
"""Below this size a decode step gains nothing from packed weights, and a swap pays for packing them."""


def packs_by_itself(num_parameters: int) -> bool:
    """Return whether an engine on CPU with so many parameters packs its weights, left to itself."""
    return num_parameters >= PACKED_FROM_PARAMETERS
