"""Next-token cross-entropy for fine-tuning; `algorithms/logprobs.py` shifts for reinforcement learning."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def next_tokens(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return what each position has to predict: ``targets[b, t] = labels[b, t + 1]``.

    Args:
        labels: int64 [B, T], where `ignore_index` marks tokens outside the loss.
        ignore_index: Fills the last column, which predicts nothing.

    Returns:
        int64 [B, T].
    """
    targets = torch.full_like(labels, ignore_index)
    targets[:, :-1] = labels[:, 1:]
    return targets


def token_losses(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return -log softmax(logits[b, t])[targets[b, t]] in fp32, and 0 where the target is `ignore_index`.

    Args:
        logits: float [B, T, V].
        targets: int64 [B, T], as `next_tokens` gives them.
        ignore_index: Marks positions without a target.

    Returns:
        float32 [B, T].
    """
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="none"
    )
    return losses.view_as(targets)
