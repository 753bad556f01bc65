"""The gradient of a whole optimizer step, over all ranks."""

from __future__ import annotations

import torch
from torch import nn


def clip_gradient(model: nn.Module, max_norm: float) -> float:
    """Scale the gradient of a sharded or plain model down to `max_norm`; return its norm before that."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return (norm.full_tensor() if isinstance(norm, torch.distributed.tensor.DTensor) else norm).item()
