"""Per-token losses made one number, by a denominator that is counted over the whole step."""

from __future__ import annotations

from typing import Literal

import torch

from vectorlm.algorithms.choice import require_choice
from vectorlm.algorithms.ratio import masked_sum

How = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_sum_fixed"]


def reduce_loss(
    per_token: torch.Tensor, mask: torch.Tensor, how: How, denominator: float | None = None
) -> torch.Tensor:
    """Sum up the masked losses of one micro-batch, as a share of the whole optimizer step's loss.

    ========================  =====================================  ==============================================
    how                       sum over                               denominator of a step
    ========================  =====================================  ==============================================
    token_mean                tokens                                 its tokens (DAPO)
    sequence_mean_token_mean  means over each sequence's tokens      its sequences (GRPO)
    sequence_mean_token_sum   sums over each sequence's tokens       its sequences (RLOO)
    sequence_sum_fixed        sums over each sequence's tokens       its sequences times a fixed length (Dr. GRPO)
    ========================  =====================================  ==============================================

    Tokens are those in the mask, sequences those that have any: a row that is masked whole counts nowhere. The sum of
    this function over all micro-batches and ranks of a step, each with the step's own denominator, is the loss of the
    step, however it was split. See `count_denominator`.

    Args:
        per_token: float [B, T].
        mask: bool or 0/1 [B, T].
        how: A row of the table.
        denominator: Counted over the whole step; None counts these rows alone, which ``sequence_sum_fixed`` cannot.

    Returns:
        float [], with gradient.

    Raises:
        ValueError: `how` is unknown, or a fixed denominator is missing.
    """
    require_choice("how", how, How)
    if denominator is None:
        if how == "sequence_sum_fixed":
            raise ValueError("sequence_sum_fixed needs its denominator: sequences times the fixed length.")
        denominator = max(count_denominator(mask, how), 1)
    per_sequence = masked_sum(per_token, mask)
    if how == "sequence_mean_token_mean":
        per_sequence = per_sequence / mask.sum(dim=-1).clamp(min=1)
    return per_sequence.sum() / denominator


def count_denominator(mask: torch.Tensor, how: How, fixed_length: int = 1) -> int:
    """Return what these rows add to the denominator of their step.

    Args:
        mask: bool or 0/1 [B, T].
        how: As for `reduce_loss`.
        fixed_length: Tokens that each sequence counts for under ``sequence_sum_fixed``.

    Returns:
        Tokens, or sequences that have any, or those times `fixed_length`.
    """
    if how == "token_mean":
        return int(mask.sum())
    num_sequences = int(mask.bool().any(dim=-1).sum())
    return num_sequences * fixed_length if how == "sequence_sum_fixed" else num_sequences
