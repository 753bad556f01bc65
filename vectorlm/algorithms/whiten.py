"""Numbers brought to mean 0 and standard deviation 1."""

from __future__ import annotations

import torch


def whiten(x: torch.Tensor, mask: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + eps), with mean and unbiased variance over the masked entries.

    Args:
        x: float, any shape; the whole batch of a step, so that the result does not depend on how it is split.
        mask: bool or 0/1 of the same shape.
        eps: Keeps a constant batch finite.

    Returns:
        float, the shape of `x`; 0 outside the mask, and everywhere where fewer than two entries are in it.
    """
    kept = mask.bool()
    count = kept.sum()
    if count < 2:
        return torch.zeros_like(x)
    inside = torch.where(kept, x, torch.zeros_like(x))
    mean = inside.sum() / count
    centred = torch.where(kept, x - mean, torch.zeros_like(x))
    return centred * torch.rsqrt(centred.square().sum() / (count - 1) + eps)
