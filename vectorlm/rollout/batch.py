"""Rollouts as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from vectorlm.algorithms.selection import Selection
from vectorlm.rollout.rollout import Rollout


@dataclass(frozen=True)
class RolloutBatch:
    """The rows of a step, the same on all ranks and on the CPU; B = P K rows, those of a group next to each other."""

    input_ids: torch.Tensor
    """int64 [B, T], prompt and completion, padded on the right."""
    attention_mask: torch.Tensor
    """int64 [B, T], 1 up to the end of each row."""
    mask: torch.Tensor
    """bool [B, T], the tokens that the policy chose, in rows that are trained on."""
    sampler_logprobs: torch.Tensor
    """float32 [B, T], the engine's; 0 outside the completions."""
    rewards: torch.Tensor
    """float32 [P, K], what each completion was worth; NaN where it could not be scored."""
    valid: torch.Tensor
    """bool [P, K]; what is not valid has no part in baselines or losses."""
    columns: torch.Tensor
    """int64 [P, K], each row's place among the completions that were sampled for its prompt."""
    num_tokens: tuple[int, ...]
    """Length of each row."""

    def without(self, rejected: torch.Tensor) -> RolloutBatch:
        """Return the batch as if some tokens had never been sampled.

        Args:
            rejected: bool [B, T]. A row that loses all its tokens is not valid any more.
        """
        mask = self.mask & ~rejected
        lost = (self.mask.any(dim=1) & ~mask.any(dim=1)).view_as(self.valid)
        return replace(self, mask=mask, valid=self.valid & ~lost)

    @cached_property
    def first_trained(self) -> tuple[int, ...]:
        """The first token of each row that is in its mask; T where none is."""
        places = torch.where(self.mask, torch.arange(self.mask.shape[1]), self.mask.shape[1])
        return tuple(places.amin(dim=1).tolist())

    @property
    def rows_per_group(self) -> int:
        """K."""
        return self.rewards.shape[1]


def make_batch(
    groups: Sequence[Sequence[Rollout]],
    rewards: torch.Tensor,
    selection: Selection,
    pad_token_id: int,
    *,
    drop_truncated: bool = False,
) -> RolloutBatch:
    """Lay groups of K rollouts each down as rows.

    Args:
        groups: P groups.
        rewards: float32 [P, K].
        selection: How they were chosen, and which of them are valid.
        pad_token_id: Fills rows up; masked in any case.
        drop_truncated: Leave completions that were cut off out of the loss; they stay in their group's baseline.

    Returns:
        The batch; rows that are not valid have an empty mask.
    """
    rollouts = [rollout for group in groups for rollout in group]
    is_valid = selection.valid.flatten().tolist()
    lengths = tuple(len(each.prompt_token_ids) + len(each.token_ids) for each in rollouts)
    shape = (len(rollouts), max(lengths, default=1))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    sampler_logprobs = torch.zeros(shape)
    for row, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True)):
        start = len(rollout.prompt_token_ids)
        input_ids[row, :length] = torch.tensor([*rollout.prompt_token_ids, *rollout.token_ids])
        attention_mask[row, :length] = 1
        sampler_logprobs[row, start:length] = torch.tensor(rollout.sampler_logprobs)
        if is_valid[row] and not (drop_truncated and rollout.is_truncated):
            mask[row, start:length] = torch.tensor(rollout.policy_mask, dtype=torch.bool)
    return RolloutBatch(
        input_ids,
        attention_mask,
        mask,
        sampler_logprobs,
        rewards,
        selection.valid,
        selection.columns,
        lengths,
    )
