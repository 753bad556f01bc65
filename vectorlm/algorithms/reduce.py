"""Reductions of values of tokens to rows, and of losses of tokens to one number."""

from __future__ import annotations

import torch

from vectorlm.algorithms.settings import Reduction
from vectorlm.settings import require_choice


def reduce_loss(
    per_token: torch.Tensor,
    mask: torch.Tensor,
    how: Reduction,
    denominator: float | None = None,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce the masked losses of one micro-batch to its share of the optimizer step's loss.

        ========================  =====================================  ==============================================
        how                       sum over                               denominator of a step
        ========================  =====================================  ==============================================
        token_mean                tokens                                 its tokens (DAPO)
        sequence_mean_token_mean  means over each sequence's tokens      its sequences (GRPO)
        sequence_mean_token_sum   sums over each sequence's tokens       its sequences (RLOO)
        sequence_sum_fixed        sums over each sequence's tokens       its sequences times a fixed length (Dr. GRPO)
        ========================  =====================================  ==============================================

    Only tokens in the mask count, and only sequences with a token in the mask. The loss of a step is the sum of this
    function over its micro-batches and ranks, all with the denominator of the step (`count_denominator`). The sum does
    not depend on how the step is split.

    Args:
        per_token: float [B, T].
        mask: bool or 0/1 [B, T].
        how: A row of the table.
        denominator: Count over the whole step; None counts these rows, except for ``sequence_sum_fixed``.
        lengths: int64 [B], the length of each row's whole sequence, if sequences have several rows; None if each row
            is a sequence.

    Raises:
        ValueError: `how` is unknown, or ``sequence_sum_fixed`` has no denominator.
    """
    require_choice("how", how, Reduction)
    if denominator is None:
        if how == "sequence_sum_fixed":
            raise ValueError(
                "denominator=None: sequence_sum_fixed needs one. Pass sequences times the fixed length."
            )
        denominator = max(count_denominator(mask, how), 1)
    per_sequence = masked_sum(per_token, mask)
    if how == "sequence_mean_token_mean":
        per_sequence = per_sequence / (mask.sum(dim=-1) if lengths is None else lengths).clamp(min=1)
    return per_sequence.sum() / denominator


def count_denominator(mask: torch.Tensor, how: Reduction, fixed_length: int = 1) -> int:
    """Return these rows' part of the denominator of their step: tokens, or sequences (times `fixed_length`)."""
    if how == "token_mean":
        return int(mask.sum())
    num_sequences = int(mask.bool().any(dim=-1).sum())
    return num_sequences * fixed_length if how == "sequence_sum_fixed" else num_sequences


def masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum each row over its masked tokens [B]; entries outside the mask may be NaN."""
    return torch.where(mask.bool(), x, torch.zeros_like(x)).sum(dim=-1)


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average each row over its masked tokens [B]; a row without any gets 0."""
    return masked_sum(x, mask) / mask.sum(dim=-1).clamp(min=1)
