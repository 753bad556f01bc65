"""Advantages of turns, from what other completions of the group got from the same turn on."""

from __future__ import annotations

import torch

from vectorlm.algorithms.groups import deviation, is_constant
from vectorlm.algorithms.settings import RewardScale


def turn_advantages(
    token_rewards: torch.Tensor, turns: torch.Tensor, mask: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compare the return of each turn with the mean of the others that came so far.

    With G[i, k] the reward of completion i from turn k on, over the completions j other than i that came to a turn k:

        A[i, k] = G[i, k] - mean_j G[j, k]

    Where no other has a turn k, the advantage of the last turn stays that another has; 0 where there is none. The
    baseline depends on other completions and on turns before k alone, so it adds nothing to the mean of the gradient,
    however the policy decides when to stop. A mean that includes completion i would: its share of the mean is larger
    where fewer have come so far, and a completion that is alone would learn nothing.

    Args:
        token_rewards: float [B, T], the rows of a group next to each other.
        turns: int64 [B, T], the turn of each token, from 0.
        mask: bool [B, T], the tokens that count.
        group_size: Rows of a group.

    Returns:
        float [P, K, S], of S turns; bool [P, K, S], which completions have a turn; and the returns, float [P, K, S].

    Source: Kool et al. 2019 (RLOO) for each turn, as in Ahmadian et al. 2024, arXiv:2402.14740, eq. 7.
    """
    num_turns = int(torch.where(mask, turns, 0).max()) + 1
    empty = token_rewards.new_zeros(len(mask), num_turns)
    index = torch.where(mask, turns, 0)
    rewards = empty.scatter_add(1, index, torch.where(mask, token_rewards, 0.0))
    has_turn = empty.scatter_add(1, index, mask.to(empty.dtype)) > 0
    shape = (-1, group_size, num_turns)
    # A completion came through the turns before one that it has, also where a correction has rejected their tokens.
    has_turn = has_turn.int().flip(1).cummax(1).values.flip(1).bool()
    returns, has_turn = rewards.flip(1).cumsum(1).flip(1).view(shape), has_turn.view(shape)
    kept = torch.where(has_turn, returns, 0.0)
    num_others = has_turn.sum(dim=1, keepdim=True) - has_turn.int()
    others = (kept.sum(dim=1, keepdim=True) - kept) / num_others.clamp(min=1)
    # Equal returns must give exactly 0, but their mean may be rounded away from them.
    by_turn = returns.transpose(1, 2).flatten(0, 1), has_turn.transpose(1, 2).flatten(0, 1)
    is_equal = is_constant(*by_turn).view(len(returns), 1, num_turns)
    compared = torch.where(is_equal, 0.0, returns - others)
    # The last turn up to here that this completion and another have.
    places = torch.arange(num_turns, device=mask.device)
    last = torch.where(has_turn & (num_others > 0), places, -1).cummax(dim=2).values
    found = torch.where(last >= 0, compared.gather(2, last.clamp(min=0)), 0.0)
    return torch.where(has_turn, found, 0.0), has_turn, returns


def scaled_as_groups(
    advantages: torch.Tensor,
    has_turn: torch.Tensor,
    returns: torch.Tensor,
    scale: RewardScale = "group",
    eps: float = 1e-6,
) -> torch.Tensor:
    """Scale what `turn_advantages` returns as `group_advantages` scales advantages of completions.

    They become what a mean that includes the completion itself gives in the first turn. The deviation is of all turns
    of the group, with ``scale="batch"`` of the returns of all turns; ``scale="none"`` does not divide.
    """
    count = has_turn.any(dim=2).sum(dim=1).view(-1, 1, 1)
    centred = advantages * ((count - 1) / count.clamp(min=1))
    if scale == "none":
        return centred
    if scale == "batch":
        return centred / (deviation(returns, has_turn) + eps)
    num_turns = has_turn.sum(dim=(1, 2), keepdim=True)
    variance = centred.square().sum(dim=(1, 2), keepdim=True) / (num_turns - 1).clamp(min=1)
    return centred / (variance.sqrt() + eps)
