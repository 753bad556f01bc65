"""The groups of a step as rows of tensors, and everything that the losses read of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vectorlm.algorithms.batch import RolloutBatch, place_rewards
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.rl.rollout import Rollout, RolloutGroup, kept_groups


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """Rollouts with everything that the losses read; the same on all ranks, and on the CPU."""

    rows: RolloutBatch
    advantages: torch.Tensor
    """float32 [B, T]."""
    old_logprobs: torch.Tensor | None
    """float32 [B, T]; None where the only optimizer step computes them itself."""
    reference_logprobs: torch.Tensor | None
    """float32 [B, T]."""
    returns: torch.Tensor | None
    """float32 [B, T], the targets of the critic."""
    marked: torch.Tensor | None = None
    """bool [B, T], the tokens that the algorithm's `mark` chose."""
    learns: torch.Tensor | None = None
    """bool [B, T], the tokens whose policy loss counts, where others only count in the denominator; None for all."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the correction found and did."""
    mismatch: Mapping[str, Any] | None = None
    """Counts of the log-ratios of trainer and engine; see `count_log_ratios`."""
    teacher_logprobs: torch.Tensor | None = None
    """float32 [B, T], where a teacher scores the tokens that were sampled."""


def make_batch(
    groups: Sequence[RolloutGroup],
    spec: AlgorithmSpec,
    *,
    pad_token_id: int = 0,
    drop_truncated: bool = False,
    oldest_version: int | None = None,
) -> RolloutBatch | None:
    """Lay out the rollouts that the algorithm trains on; None where there is nothing to learn.

    Rows that are not valid have an empty mask. With `drop_truncated`, truncated completions have one too, but stay in
    the baselines that others are compared with. Tokens of versions before `oldest_version` count as never sampled.
    """
    if not (groups := kept_groups(groups)):
        return None
    rewards = torch.stack([group.rewards for group in groups])
    eligible = torch.ones_like(rewards, dtype=torch.bool)
    if drop_truncated and spec.chooses:
        # A completion that the loss leaves out must not be chosen, nor be half of a pair.
        eligible = torch.tensor([[not each.is_truncated for each in group.rollouts] for group in groups])
    columns, valid = spec.select(rewards, eligible)
    rewards = rewards.gather(1, columns)
    rollouts = [
        group.rollouts[column]
        for group, chosen in zip(groups, columns.tolist(), strict=True)
        for column in chosen
    ]
    owners, is_trained = None, valid
    # A loss of pairs compares whole rollouts, and a critic values places in one row.
    if spec.level != "group" and not spec.needs_critic and any(each.branches for each in rollouts):
        found = _with_branches(rollouts, columns, rewards, valid)
        rollouts, owners, columns, rewards, is_trained, valid = found
    lengths = [len(each.prompt_token_ids) + len(each.token_ids) for each in rollouts]
    shape = (len(rollouts), max(lengths))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    is_stale = torch.zeros(shape, dtype=torch.bool)
    cut_off = torch.tensor([[drop_truncated and each.is_truncated] for each in rollouts])
    is_left_out = cut_off if owners is None else cut_off[owners]
    is_valid = is_trained.flatten().tolist()
    sampler_logprobs = torch.zeros(shape)
    for row, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True)):
        start = len(rollout.prompt_token_ids)
        input_ids[row, :length] = torch.tensor([*rollout.prompt_token_ids, *rollout.token_ids])
        attention_mask[row, :length] = 1
        sampler_logprobs[row, start:length] = torch.tensor(rollout.sampler_logprobs)
        if oldest_version is not None:
            is_stale[row, start:length] = torch.tensor(rollout.versions) < oldest_version
        if is_valid[row]:
            mask[row, start:length] = torch.tensor(rollout.policy_mask, dtype=torch.bool)
    greedy = [group.greedy_reward for group in groups if group.greedy_reward is not None]
    parts, part_weights = _parts_of(groups, columns) if spec.needs_parts else (None, None)
    turns = turn_rewards = None
    # A loss of completions has one advantage for all turns.
    if spec.level == "token" and any(any(each.turn_rewards) for each in rollouts):
        turns, turn_rewards = _turns_of(rollouts, shape, owners)
    compared = mask if owners is None else mask & valid.view(-1, 1)
    batch = RolloutBatch(
        input_ids,
        attention_mask,
        mask & ~is_left_out,
        sampler_logprobs,
        rewards,
        valid,
        columns,
        place_rewards(compared, rewards, turn_rewards),
        greedy_rewards=torch.stack(greedy) if greedy else None,
        reward_parts=parts,
        part_weights=part_weights,
        baseline_mask=compared if is_left_out.any() or owners is not None else None,
        turns=turns,
        turn_rewards=turn_rewards,
        owners=owners,
        turn_starts=_turn_starts_of(rollouts, shape),
    )
    # A rollout's own row may have no token to train on while its branches have.
    if is_stale.any() or owners is not None:
        batch = batch.without(is_stale)
    return batch if batch.mask.any() else None


def _parts_of(groups: Sequence[RolloutGroup], columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each reward alone, float32 [N, P, K], and the weight of each."""
    weights = groups[0].reward_weights
    by_name = [torch.stack([group.rewards_by_name[name] for group in groups]) for name in weights]
    return torch.stack([each.gather(1, columns) for each in by_name]), torch.tensor(list(weights.values()))


def _with_branches(
    rollouts: Sequence[Rollout], columns: torch.Tensor, rewards: torch.Tensor, valid: torch.Tensor
) -> tuple[list[Rollout], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows of groups with those of their branches behind, as many for each group.

    Also the row of the rollout that each belongs to, its columns and rewards, which rows are trained on, and which are
    compared.
    """
    group_size = columns.shape[1]
    groups = [rollouts[start : start + group_size] for start in range(0, len(rollouts), group_size)]
    num_rows = group_size + max(sum(len(each.branches) for each in group) for group in groups)
    rows: list[Rollout] = []
    owners = torch.zeros(len(groups), num_rows, dtype=torch.int64)
    is_filler = torch.zeros(len(groups), num_rows, dtype=torch.bool)
    for place, group in enumerate(groups):
        belongs_to = [*range(group_size)]
        rows += group
        for column, rollout in enumerate(group):
            rows += rollout.branches
            belongs_to += [column] * len(rollout.branches)
        owners[place, : len(belongs_to)] = torch.tensor(belongs_to)
        is_filler[place, len(belongs_to) :] = True
        nothing = Rollout(group[0].prompt_record, group[0].prompt_token_ids[:1], (), (), (), (), "", None)
        rows += [nothing] * (num_rows - len(belongs_to))
    columns, rewards, is_trained = (x.gather(1, owners) for x in (columns, rewards, valid))
    is_trained = is_trained & ~is_filler
    # Whole rollouts are compared, and not their branches.
    compared = is_trained & (torch.arange(num_rows) < group_size)
    owners = (owners + torch.arange(len(owners))[:, None] * num_rows).flatten()
    return rows, owners, columns, rewards, is_trained, compared


def _turn_starts_of(rollouts: Sequence[Rollout], shape: tuple[int, int]) -> torch.Tensor:
    """Return where the turn of each token of the policy begins, int64 [B, T]; -1 for other tokens."""
    found = torch.full(shape, -1)
    for row, rollout in enumerate(rollouts):
        start = len(rollout.prompt_token_ids)
        for first, end in rollout.turn_places:
            found[row, start + first : start + end] = start + first
    return found


def _turns_of(
    rollouts: Sequence[Rollout], shape: tuple[int, int], owners: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the turn of each token, int64 [B, T], and the reward of each turn at its last token, float32 [B, T]."""
    turns, rewards = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    for row, rollout in enumerate(rollouts):
        first = start = len(rollout.prompt_token_ids)
        for turn, end in enumerate(rollout.turn_ends):
            turns[row, start : first + end] = turn
            start = first + end
            if turn < len(rollout.turn_rewards) and start:
                # At the last token of what was written up to here: a turn may be empty.
                rewards[row, start - 1] += rollout.turn_rewards[turn]
    if owners is not None:
        # The tokens of branches have the advantage of the whole rollout.
        turns[owners != torch.arange(len(owners))] = 0
    return turns, rewards
