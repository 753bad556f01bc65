"""Facts about vLLM engines, which doctor and memory plans read without loading vLLM."""

SUPPORTED_VERSIONS = ">=0.26,<0.34"
"""The versions of vLLM that have all names that vectorlm uses (tests/gpu/test_vllm_window.py)."""

CPU_KV_CACHE_BYTES = 512 << 20
"""Size of the KV cache on CPU."""

PACKED_FROM_PARAMETERS = 4_000_000
"""Smallest model whose weights are packed; for smaller models packing slows updates and does not speed up decoding."""


def packs_by_itself(num_parameters: int) -> bool:
    """Return whether `receiver: auto` packs the weights of a model of this size."""
    return num_parameters >= PACKED_FROM_PARAMETERS
