"""The records that an algorithm's functions read.

Shapes: P prompts, K trained completions of each, B = P K rows (the rows of a group are neighbours), T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """All rows of a step, the same on all ranks and on the CPU; advantages are computed from it."""

    input_ids: torch.Tensor
    """int64 [B, T], prompt and completion, padded on the right."""
    attention_mask: torch.Tensor
    """int64 [B, T], 1 up to the end of each row."""
    mask: torch.Tensor
    """bool [B, T], the tokens that the policy chose, in rows that are trained on."""
    sampler_logprobs: torch.Tensor
    """float32 [B, T], the engine's; 0 outside the completions."""
    rewards: torch.Tensor
    """float32 [P, K], less the KL penalty where it is part of the reward; NaN where a completion was not scored, and
    for `AlgorithmSpec.advantages` also where it is not `valid`."""
    valid: torch.Tensor
    """bool [P, K]; other completions have no effect on baselines or losses."""
    columns: torch.Tensor
    """int64 [P, K], each row's index among the completions that were sampled for its prompt."""
    token_rewards: torch.Tensor
    """float32 [B, T]: the reward at the last token of each completion, or of each turn that has one, less the KL
    penalty at each token."""
    values: torch.Tensor | None = None
    """float32 [B, T], the critic's, for algorithms that need one."""
    greedy_rewards: torch.Tensor | None = None
    """float32 [P], of greedy completions, for algorithms that need them."""
    reward_parts: torch.Tensor | None = None
    """float32 [N, P, K], each reward alone, for algorithms that need them."""
    part_weights: torch.Tensor | None = None
    """float32 [N], the weight of each reward in the sum."""
    old_logprobs: torch.Tensor | None = None
    """float32 [B, T], the policy's before the first optimizer step, for algorithms that need them."""
    gradient_norms: torch.Tensor | None = None
    """float32 [B, T], squared norms of the gradient of each log-probability by the logits, for those that need them."""
    weights: torch.Tensor | None = None
    """float32 [B, T], what the correction multiplies the policy's losses with, or with bypass did at the rollout's
    weights; 1 where completions are only compared with. None counts every token once."""
    baseline_mask: torch.Tensor | None = None
    """bool [B, T], `mask` and completions that others are compared with but that are not trained on; None: none."""

    owners: torch.Tensor | None = None
    """int64 [B], the row that stands for the rollout of each row; None where each row is a rollout. Only that row is
    `valid` and in `baseline_mask`; the other rows of a rollout, which an agent makes, are in `mask` alone."""
    branch_lengths: torch.Tensor | None = None
    """int64 [B], for `AlgorithmSpec.advantages`: tokens of each rollout that lie in its other rows; None where no
    rollout has other rows."""
    turns: torch.Tensor | None = None
    """int64 [B, T], the turn of each token that the policy chose, from 0; None where no turn has its own reward."""
    turn_rewards: torch.Tensor | None = None
    """float32 [B, T], what the environment gave for a turn, at its last token; part of `rewards`."""
    turn_starts: torch.Tensor | None = None
    """int64 [B, T], where the turn that each token of the policy belongs to begins in its row; -1 for other tokens."""

    @property
    def rows_per_group(self) -> int:
        """Return K."""
        return self.rewards.shape[1]

    @cached_property
    def num_tokens(self) -> tuple[int, ...]:
        """The length of each row."""
        return tuple(self.attention_mask.sum(dim=1).tolist())

    @cached_property
    def first_trained(self) -> tuple[int, ...]:
        """The index of each row's first token in the mask; T where there is none."""
        places = torch.where(self.mask, torch.arange(self.mask.shape[1]), self.mask.shape[1])
        return tuple(places.amin(dim=1).tolist())

    @cached_property
    def lengths(self) -> torch.Tensor:
        """The trained tokens of the rollout that each row belongs to, in all of its rows, int64 [B]."""
        counts = self.mask.sum(dim=1)
        if self.owners is None:
            return counts
        return torch.zeros_like(counts).index_add(0, self.owners, counts)[self.owners]

    @property
    def trained_rollouts(self) -> torch.Tensor:
        """Which rows stand for a rollout that is trained on, bool [B]."""
        rows = torch.arange(len(self.mask))
        return (self.lengths > 0) & (rows == (rows if self.owners is None else self.owners))

    def for_baselines(self) -> RolloutBatch:
        """Return the batch with the completions that are only compared with in its mask.

        Branches, and completions that a correction has rejected, have rewards too: here they are NaN, so that nothing
        is compared with them.
        """

        def of_valid(rewards: torch.Tensor) -> torch.Tensor:
            return torch.where(self.valid, rewards, torch.nan)

        mask, branch_lengths = self.mask if self.baseline_mask is None else self.baseline_mask, None
        if self.owners is not None:
            branch_lengths = torch.zeros_like(self.owners)
            branch_lengths.index_add_(0, self.owners, (self.mask & ~mask).sum(dim=1))
        return replace(
            self,
            mask=mask,
            branch_lengths=branch_lengths,
            rewards=of_valid(self.rewards),
            reward_parts=None if self.reward_parts is None else of_valid(self.reward_parts),
        )

    def with_compared(self) -> RolloutBatch:
        """Return the batch with both in its mask: what is trained on, and what that is compared with."""
        return self if self.baseline_mask is None else replace(self, mask=self.mask | self.baseline_mask)

    def with_branches(self, advantages: torch.Tensor) -> torch.Tensor:
        """Give the tokens of branches the advantage of the first token in their rollout's row, [B, T] to [B, T]."""
        if self.owners is None:
            return advantages
        mask = self.for_baselines().mask
        first = advantages.gather(1, mask.int().argmax(dim=1, keepdim=True))
        return torch.where(self.mask & ~mask, first[self.owners], advantages)

    def spread(self, advantages: torch.Tensor) -> torch.Tensor:
        """Give each token the advantage of its completion: [P, K] to [B, T]."""
        return torch.where(self.mask, advantages.reshape(-1, 1), 0.0)

    def spread_turns(self, advantages: torch.Tensor) -> torch.Tensor:
        """Give each token the advantage of its turn: [P, K, S] to [B, T]."""
        assert self.turns is not None
        turns = torch.where(self.mask, self.turns, 0)
        return torch.where(self.mask, advantages.flatten(0, 1).gather(1, turns), 0.0)

    def without(self, rejected: torch.Tensor) -> RolloutBatch:
        """Remove the `rejected` tokens, bool [B, T], from the mask.

        A rollout that loses all its tokens becomes invalid. If only the row that stands for it does, the first of its
        rows with tokens left takes its place.
        """
        mask = self.mask & ~rejected
        has_tokens = mask.any(dim=1)
        lost = (self.mask.any(dim=1) & ~has_tokens).view_as(self.valid)
        left = replace(self, mask=mask, valid=self.valid & ~lost)
        if self.baseline_mask is not None:
            left = replace(left, baseline_mask=self.baseline_mask & ~(self.mask & rejected))
        if self.owners is not None:
            assert left.baseline_mask is not None
            rows = torch.arange(len(mask))
            places = torch.where(has_tokens, rows, len(rows))
            first = torch.full_like(rows, len(rows)).scatter_reduce(0, self.owners, places, "amin")
            owners = torch.where(first < len(rows), first, self.owners)[self.owners]
            stands = owners == rows
            left = replace(
                left,
                owners=owners,
                valid=(left.valid | has_tokens.view_as(self.valid)) & stands.view_as(self.valid),
                baseline_mask=torch.where(has_tokens[:, None], mask, left.baseline_mask) & stands[:, None],
            )
        placed = place_rewards(left.for_baselines().mask, self.rewards, self.turn_rewards)
        return replace(left, token_rewards=placed)

    def penalised(self, penalty: torch.Tensor) -> RolloutBatch:
        """Subtract a penalty for each token, float32 [B, T], from the rewards; of branches, at their rollout's end."""
        total, token_rewards = penalty.sum(dim=1), self.token_rewards - penalty
        if self.owners is not None:
            is_branch = self.owners != torch.arange(len(self.owners))
            of_branches = torch.zeros_like(total).index_add(0, self.owners, total * is_branch)
            token_rewards -= place_rewards(self.for_baselines().mask, of_branches)
            total = total + of_branches
        return replace(self, rewards=self.rewards - total.view_as(self.rewards), token_rewards=token_rewards)


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The inputs of a loss: B rows of a micro-batch, the rows of a group next to each other.

    In losses that read whole rollouts, the tokens of a rollout's other rows follow behind each row, without gradient.
    """

    policy_logprobs: torch.Tensor
    """float [B, T], with gradient."""
    old_logprobs: torch.Tensor
    """float [B, T], the trainer's before the batch's first optimizer step; with bypass the engine's."""
    reference_logprobs: torch.Tensor | None
    """float [B, T], for algorithms and penalties that need them."""
    advantages: torch.Tensor
    """float [B, T]."""
    rewards: torch.Tensor
    """float [B], of whole completions."""
    mask: torch.Tensor
    """bool [B, T], the tokens that the policy chose; all False in a row that is not valid."""
    rows_per_group: int
    """K."""
    marked: torch.Tensor | None = None
    """bool [B, T], the tokens that `AlgorithmSpec.mark` chose."""
    log_weights: torch.Tensor | None = None
    """float [B], logarithms of the correction's weights of whole completions, where `AlgorithmSpec.reads_weights`."""


def place_rewards(
    mask: torch.Tensor, rewards: torch.Tensor, turn_rewards: torch.Tensor | None = None
) -> torch.Tensor:
    """Put the rewards [P, K] on the last masked token of each row, float32 [B, T].

    What `turn_rewards` [B, T] hold of them stays where it is, or at the last masked token before: no token is credited
    with what came before it.
    """
    token_rewards = torch.zeros(mask.shape)
    places = torch.where(mask, torch.arange(mask.shape[1]), -1).cummax(dim=1).values
    last = places[:, -1]
    rows = torch.nonzero(last >= 0)[:, 0]
    rest = rewards.view(-1)
    if turn_rewards is not None:
        token_rewards.scatter_add_(1, places.clamp(min=0), torch.where(places >= 0, turn_rewards, 0.0))
        rest = rest - turn_rewards.sum(dim=1)
    token_rewards[rows, last[rows]] += rest[rows]
    return token_rewards
