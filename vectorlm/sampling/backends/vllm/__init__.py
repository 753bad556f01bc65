"""What an engine on CPU is given where nobody says otherwise; memory plans read it too, without loading vLLM."""

CPU_KV_CACHE_BYTES = 512 << 20
"""Of the KV cache."""

PACKED_FROM_PARAMETERS = 4_000_000
"""Below this size a decode step gains nothing from packed weights, and a swap pays for packing them."""


def packs_by_itself(num_parameters: int) -> bool:
    """Return whether `receiver: auto` packs the weights of a model of this size."""
    return num_parameters >= PACKED_FROM_PARAMETERS
