"""Everything that the memory of a run depends on."""

from __future__ import annotations

from dataclasses import dataclass

from vectorlm.memory.model_size import ModelSize

CPU_KV_CACHE_BYTES = 512 << 20
"""vLLM's KV cache on CPU where none is asked for; without a number, vLLM takes a share of the host's memory."""


@dataclass(frozen=True, kw_only=True)
class EngineDemand:
    """What the engine asks for."""

    bytes_per_weight: int
    """2 or 4."""
    tensor_parallel: int = 1
    """Devices that share one engine's weights and KV cache."""
    kv_cache_bytes: int | None = None
    """The size of the KV cache on each device, where it was given."""
    device_share: float = 0.35
    """The share of the device that the engine takes where it was not; not used on CPU."""
    max_model_len: int
    """Longest sequence that it must hold, in tokens."""
    is_packed: bool = False
    """Whether the weights are held twice, plain and in oneDNN's layout (CPU)."""
    sleep: str = "none"
    """What sleeps while the trainer works: `none`, `kv_cache` or `all`."""
    offload_optimizer: bool = False
    """Whether the optimizer leaves the device while the engine works."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What trainer and engine ask for on one node."""

    model: ModelSize
    num_trainable: int
    """Parameters that have gradients and optimizer state."""
    num_ranks: int
    """Ranks on this node."""
    num_shards: int
    """Ranks over which one copy of weights, gradients and optimizer state is spread."""
    keeps_gathered: bool
    """Whether a block's gathered weights stay between forward and backward (``SHARD_GRAD_OP``, ``NO_SHARD``)."""
    is_mixed: bool
    """Whether it computes in bfloat16."""
    recomputes: bool
    """Whether a block's activations are computed again in the backward pass."""
    micro_batch_size: int
    """Sequences in one forward pass of one rank."""
    sequence_tokens: int
    """Tokens of the longest sequence."""
    num_trained_copies: int = 0
    """Models of the same size that are trained besides: a critic."""
    num_frozen_copies: int = 0
    """Models of the same size that only compute: a reference, reward models."""
    engine: EngineDemand | None
    """None trains without one."""
    device_bytes: int
    """Memory of one device; on CPU of the whole machine, which all ranks and the engine share."""
    is_cpu: bool
    """Whether everything runs on CPU."""
