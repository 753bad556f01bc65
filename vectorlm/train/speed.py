"""How much a model computes for a token, and how much memory a rank holds."""

from __future__ import annotations

from typing import Any

import psutil
import torch


def num_multiplied(model: Any, has_tied_head: bool) -> int:
    """Count the weights that a token is multiplied with: of the embeddings it only reads one row."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return total if has_tied_head else total - model.get_input_embeddings().weight.numel()


def memory_bytes(device: str) -> int:
    """Return the most device memory that torch has held on this rank; on CPU, what its process holds now."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss
