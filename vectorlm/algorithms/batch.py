"""The records that the functions of an algorithm read.

Shapes: P prompts, K trained completions per prompt, B = P K rows (the rows of a group are neighbours), T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """All rows of a step, from which advantages are computed; the same on all ranks, and on the CPU."""

    input_ids: torch.Tensor
    """int64 [B, T], prompt and completion, padded on the right."""
    attention_mask: torch.Tensor
    """int64 [B, T], 1 up to the end of each row."""
    mask: torch.Tensor
    """bool [B, T], the tokens that the policy sampled, in rows that are trained on."""
    sampler_logprobs: torch.Tensor
    """float32 [B, T], the engine's log-probabilities; 0 outside the completions."""
    rewards: torch.Tensor
    """float32 [P, K], minus the KL penalty if `kl_in` is ``reward``. NaN for completions without a score; in
    `AlgorithmSpec.advantages` also for completions that are not `valid`."""
    valid: torch.Tensor
    """bool [P, K]; completions that are not valid have no effect on baselines or losses."""
    columns: torch.Tensor
    """int64 [P, K], the index of every row among the sampled completions of its prompt."""
    token_rewards: torch.Tensor
    """float32 [B, T], rewards minus the KL penalty of every token. A reward is at the last token of its completion or
    turn."""
    values: torch.Tensor | None = None
    """float32 [B, T], the critic's values, if `needs_critic`."""
    greedy_rewards: torch.Tensor | None = None
    """float32 [P], rewards of greedy completions, if `needs_greedy`."""
    reward_parts: torch.Tensor | None = None
    """float32 [N, P, K], the single rewards, if `needs_parts`."""
    part_weights: torch.Tensor | None = None
    """float32 [N], the weights of the single rewards in their sum."""
    old_logprobs: torch.Tensor | None = None
    """float32 [B, T], the policy's log-probabilities before the first optimizer step, if `needs_old`."""
    gradient_norms: torch.Tensor | None = None
    """float32 [B, T], squared norms of the gradients of log-probabilities by logits, if `needs_gradient_norms`."""
    weights: torch.Tensor | None = None
    """float32 [B, T], off-policy weights of the policy loss (with `bypass`: computed before the first optimizer step);
    1 for completions used only as a baseline. None means 1 for every token."""
    baseline_mask: torch.Tensor | None = None
    """bool [B, T], `mask` plus completions that enter baselines but no loss; None if there are none."""
    trained_mask: torch.Tensor | None = None
    """bool [B, T], the tokens of the loss, in `AlgorithmSpec.advantages`, where `mask` has tokens of baselines; None
    means `mask`."""
    owners: torch.Tensor | None = None
    """int64 [B], index of the main row of each row's rollout; None if every row is a rollout. Only main rows are
    `valid` and in `baseline_mask`. The other rows, branches that an agent made, are in `mask` only."""
    branch_lengths: torch.Tensor | None = None
    """int64 [B], number of tokens in the branches of a rollout, for `AlgorithmSpec.advantages`; None if no rollout has
    branches."""
    turns: torch.Tensor | None = None
    """int64 [B, T], the turn of every sampled token, from 0; None if no turn has its own reward."""
    turn_rewards: torch.Tensor | None = None
    """float32 [B, T], the environment's reward for a turn, at the turn's last token, minus the KL penalty of every
    token; included in `rewards`."""
    turn_starts: torch.Tensor | None = None
    """int64 [B, T], the position where the turn of a sampled token begins in its row; -1 for other tokens."""
    images: Sequence[Sequence[Any]] | None = None
    """The pictures of each row with their places (`vectorlm.data.images.PlacedPicture`), if the model reads images."""
    routes: Sequence[Any] | None = None
    """The experts that the engine chose in each row, an array [t, L, K] or None (see `vectorlm.types.Completion`)."""
    replayed: Sequence[Any] | None = None
    """The experts that the policy uses in each row instead of its own choice, in the format of `routes`."""
    prompts: Sequence[Any] = ()
    """The P prompts, for error messages; empty if no message needs them."""
    teacher_prompts: Sequence[Sequence[int]] | None = None
    """The P prompts that a teacher reads instead of the policy's prompts; None if it reads the same prompts."""
    prompt_lengths: Sequence[int] = ()
    """Number of prompt tokens of each row, if there are `teacher_prompts`."""

    @property
    def rows_per_group(self) -> int:
        """Return K."""
        return self.rewards.shape[1]

    @cached_property
    def num_tokens(self) -> tuple[int, ...]:
        """Number of tokens of each row."""
        return tuple(self.attention_mask.sum(dim=1).tolist())

    @cached_property
    def first_trained(self) -> tuple[int, ...]:
        """The index of the first token in the mask of every row; T if it has none."""
        places = torch.where(self.mask, torch.arange(self.mask.shape[1]), self.mask.shape[1])
        return tuple(places.amin(dim=1).tolist())

    @cached_property
    def lengths(self) -> torch.Tensor:
        """The number of trained tokens in all rows of the rollout that a row belongs to, int64 [B]."""
        counts = self.mask.sum(dim=1)
        if self.owners is None:
            return counts
        return torch.zeros_like(counts).index_add(0, self.owners, counts)[self.owners]

    @cached_property
    def for_teacher(self) -> RolloutBatch:
        """The rows as the teacher reads them, with the tokens of `mask` in the same order.

        Only `input_ids`, the masks and `turn_starts` describe these rows; other fields keep the shape [B, T].
        """
        if self.teacher_prompts is None:
            return self
        prompts = [self.teacher_prompts[row // self.rows_per_group] for row in range(len(self.mask))]
        shifts = [len(prompt) - length for prompt, length in zip(prompts, self.prompt_lengths, strict=True)]
        longest = max(length + shift for length, shift in zip(self.num_tokens, shifts, strict=True))
        before = torch.arange(longest) - torch.tensor(shifts)[:, None]
        lengths, starts = torch.tensor(self.num_tokens)[:, None], torch.tensor(self.prompt_lengths)[:, None]
        is_answer = (before >= starts) & (before < lengths)
        places = before.clamp(0, self.mask.shape[1] - 1)
        input_ids = torch.where(is_answer, self.input_ids.gather(1, places), self.input_ids[0, 0])
        for row, prompt in enumerate(prompts):
            input_ids[row, : len(prompt)] = torch.tensor(prompt)
        turn_starts = None
        if self.turn_starts is not None:
            moved = self.turn_starts + torch.tensor(shifts)[:, None]
            moved = torch.where(self.turn_starts < 0, self.turn_starts, moved).gather(1, places)
            turn_starts = torch.where(is_answer, moved, -1)
        return replace(
            self,
            input_ids=input_ids,
            attention_mask=(before < lengths).long(),
            mask=self.mask.gather(1, places) & is_answer,
            turn_starts=turn_starts,
            routes=None,
            replayed=None,
            teacher_prompts=None,
        )

    @property
    def trained_rollouts(self) -> torch.Tensor:
        """Whether each row is the main row of a rollout that is trained on, bool [B]."""
        rows = torch.arange(len(self.mask))
        return (self.lengths > 0) & (rows == (rows if self.owners is None else self.owners))

    @property
    def trained_groups(self) -> torch.Tensor:
        """Whether each group has tokens to train on, bool [P]."""
        mask = self.mask if self.trained_mask is None else self.trained_mask
        return mask.view(len(self.rewards), -1).any(dim=1)

    def for_baselines(self) -> RolloutBatch:
        """Return the batch with all completions that enter baselines in its mask.

        No baseline includes branches, or completions that a correction has rejected: their rewards become NaN.
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
            trained_mask=self.mask,
            branch_lengths=branch_lengths,
            rewards=of_valid(self.rewards),
            reward_parts=None if self.reward_parts is None else of_valid(self.reward_parts),
        )

    def with_compared(self) -> RolloutBatch:
        """Return the batch with both `mask` and `baseline_mask` in its mask."""
        return self if self.baseline_mask is None else replace(self, mask=self.mask | self.baseline_mask)

    def with_branches(self, advantages: torch.Tensor) -> torch.Tensor:
        """Give the tokens of branches the advantage of the first token in the main row, [B, T] to [B, T]."""
        if self.owners is None:
            return advantages
        mask = self.for_baselines().mask
        first = advantages.gather(1, mask.int().argmax(dim=1, keepdim=True))
        return torch.where(self.mask & ~mask, first[self.owners], advantages)

    def spread(self, advantages: torch.Tensor) -> torch.Tensor:
        """Give every token the advantage of its completion: [P, K] to [B, T]."""
        return torch.where(self.mask, advantages.reshape(-1, 1), 0.0)

    def spread_turns(self, advantages: torch.Tensor) -> torch.Tensor:
        """Give every token the advantage of its turn: [P, K, S] to [B, T]."""
        assert self.turns is not None
        turns = torch.where(self.mask, self.turns, 0)
        return torch.where(self.mask, advantages.flatten(0, 1).gather(1, turns), 0.0)

    def whole_rewards(self) -> torch.Tensor:
        """Return `token_rewards` with every reward at its own token, even if that token is not trained on."""
        return place_rewards(self.attention_mask.bool(), self.rewards, self.turn_rewards)

    def without(self, rejected: torch.Tensor) -> RolloutBatch:
        """Remove the `rejected` tokens, bool [B, T], from the mask.

        A rollout that loses all its tokens becomes invalid. If only its main row loses all tokens, the rollout's first
        row with tokens becomes the main row.
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
        """Subtract a penalty per token, float32 [B, T], from the rewards; branches pay at the end of the main row."""
        total, token_rewards = penalty.sum(dim=1), self.token_rewards - penalty
        if self.owners is not None:
            is_branch = self.owners != torch.arange(len(self.owners))
            of_branches = torch.zeros_like(total).index_add(0, self.owners, total * is_branch)
            token_rewards -= place_rewards(self.for_baselines().mask, of_branches)
            total = total + of_branches
        return replace(
            self,
            rewards=self.rewards - total.view_as(self.rewards),
            token_rewards=token_rewards,
            turn_rewards=None if self.turn_rewards is None else self.turn_rewards - penalty,
        )


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The inputs of a loss: B rows of a micro-batch, where the rows of a group are neighbours.

    For losses of whole rollouts, the tokens of a rollout's branches follow its row, without gradient.
    """

    policy_logprobs: torch.Tensor
    """float [B, T], the policy's log-probabilities, with gradient."""
    old_logprobs: torch.Tensor
    """float [B, T], log-probabilities by the trainer before the batch's first optimizer step; with `bypass`, by the
    engine."""
    reference_logprobs: torch.Tensor | None
    """float [B, T], the reference's log-probabilities; None if neither the algorithm nor a KL penalty needs them."""
    advantages: torch.Tensor
    """float [B, T]."""
    rewards: torch.Tensor
    """float [B], the rewards of whole completions."""
    mask: torch.Tensor
    """bool [B, T], the tokens that the policy sampled; all False in a row that is not valid."""
    rows_per_group: int
    """K."""
    marked: torch.Tensor | None = None
    """bool [B, T], the result of `AlgorithmSpec.mark`."""
    log_weights: torch.Tensor | None = None
    """float [B], log of the correction's weights of whole completions, if `AlgorithmSpec.reads_weights`."""


def place_rewards(
    mask: torch.Tensor, rewards: torch.Tensor, turn_rewards: torch.Tensor | None = None
) -> torch.Tensor:
    """Place the rewards [P, K] at the last masked token of their rows, float32 [B, T].

    The part of a reward that is in `turn_rewards` [B, T] stays at its token, or at the last masked token before it. No
    token is credited with an earlier reward.
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
