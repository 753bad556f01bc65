"""Advantages of completions, relative to the rewards of other completions of the batch.

`rewards` are float [P, G]; NaN marks a completion without a score. A completion that is not `valid`, bool [P, G], has
advantage 0 and is excluded from means and deviations. Advantages are float [P, G]. Groups of a single completion raise
ValueError in `group_advantages` and `leave_one_out_advantages`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from vectorlm.algorithms.settings import RewardScale
from vectorlm.settings import require_choice


def group_advantages(
    rewards: torch.Tensor, scale: RewardScale = "group", valid: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """Compare each completion with the mean of its group: (r - mean) / (std + eps).

    std is the deviation of the group's rewards, or with ``scale="batch"`` of all rewards. ``scale="none"`` does not
    divide. Groups of equal rewards and groups with fewer than two valid completions get 0.

    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, section 4.1.2, with the unbiased standard deviation;
    Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, for ``none``; Liu et al. 2025 (Lite PPO), arXiv:2508.08221, for
    ``batch``.
    """
    require_choice("scale", scale, RewardScale)
    kept, count = _kept(rewards, valid)
    enough = kept & (count >= 2)
    mean = _sum(rewards, kept) / count.clamp(min=1)
    centred = torch.where(enough, rewards - mean, 0.0)
    # A group of equal rewards must give exactly 0, but rounding can move its mean away from them.
    centred = torch.where(is_constant(rewards, kept), 0.0, centred)
    if scale == "none":
        return centred
    if scale == "batch":
        return centred / (deviation(rewards, kept) + eps)
    variance = centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt() + eps)


def leave_one_out_advantages(rewards: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Compare each completion with the mean of its group's other completions: r[i] - mean(r[j], j != i).

    Advantages of a group sum to 0. A completion without another valid one in its group gets 0.

    Source: Kool et al. 2019 (RLOO); Ahmadian et al. 2024, arXiv:2402.14740, eq. 7.
    """
    kept, count = _kept(rewards, valid)
    others = (_sum(rewards, kept) - rewards) / (count - 1).clamp(min=1)
    advantages = torch.where(kept & (count >= 2), rewards - others, 0.0)
    return torch.where(is_constant(rewards, kept), 0.0, advantages)


def pass_at_k_advantages(
    rewards: torch.Tensor, k: int, valid: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """Compare the best of k completions with a completion among them to the best of any k.

    The reward of a choice of k out of n completions is their maximum. The advantage is (mean[i] - mean) / (std + eps),
    with mean and std over all C(n, k) choices, and mean[i] over the choices with completion i. For rewards of 0 and 1
    this is the analytical advantage of Pass@k training; for k = 1 it is `group_advantages` with the biased deviation.
    Groups with fewer than k valid completions get 0.

    Source: Chen et al. 2025 (Pass@k training), arXiv:2508.10751, section 2.4; the maximum for any reward as in Walder
    and Karkhanis 2025, arXiv:2505.15201.

    Raises:
        ValueError: k is not between 1 and the size of the groups.
    """
    if not 1 <= k <= rewards.shape[1]:
        raise ValueError(f"k={k} must be between 1 and the group's {rewards.shape[1]} completions.")
    kept, count = _kept(rewards, valid)
    # Ascending, invalid rewards last: a reward is the best of every choice of itself and rewards before it.
    order = torch.where(kept, rewards, torch.inf).argsort(dim=1)
    ordered = torch.where(kept, rewards, 0.0).gather(1, order).double()
    places = torch.arange(rewards.shape[1], device=rewards.device)
    is_there = places < count
    best = _choose(places, k - 1).expand_as(ordered) * is_there
    total = _choose(count, k).clamp(min=1)
    mean = (best * ordered).sum(dim=1, keepdim=True) / total
    variance = (best * (ordered - mean).square()).sum(dim=1, keepdim=True) / total
    # The best of k with completion i is i itself if all others are lower, else a higher one.
    above = _choose(places - 1, k - 2).expand_as(ordered) * is_there * ordered
    higher = above.flip(1).cumsum(1).flip(1) - above
    mine = (best * ordered + higher) / _choose(count - 1, k - 1).clamp(min=1)
    advantages = (mine - mean) / (variance.sqrt() + eps)
    advantages = torch.where(is_there & (count >= k) & ~is_constant(rewards, kept), advantages, 0.0)
    return torch.zeros_like(rewards).scatter(1, order, advantages.to(rewards.dtype))


def decoupled_advantages(
    rewards: torch.Tensor, weights: torch.Tensor, valid: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """Compare the completions of a group reward by reward, then the weighted sums across the batch.

    `rewards` are float [N, P, G] and `weights` float [N]; a reward that is NaN counts as the mean of its group.

    Source: Liu et al. 2026 (GDPO), arXiv:2601.05242.
    """
    parts = torch.stack([group_advantages(part, valid=valid, eps=eps) for part in rewards])
    total = (weights.view(-1, 1, 1) * parts).sum(dim=0)
    kept, _ = _kept(torch.where(rewards.isnan().all(dim=0), torch.nan, total), valid)
    return batch_advantages(total, kept, eps)


def length_weighted_advantages(
    rewards: torch.Tensor, lengths: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Compare each completion with the mean of its group, weighted by tokens: r - sum(l r) / sum(l).

    This baseline has the least variance if the gradients of tokens are orthogonal and of similar size. `lengths` are
    [P, G].

    Source: Hao et al. 2025 (OPO), arXiv:2505.23585.
    """
    kept, count = _kept(rewards, valid)
    weights = torch.where(kept, lengths, 0).to(rewards.dtype)
    baseline = _sum(weights * rewards, kept) / weights.sum(dim=1, keepdim=True).clamp(min=1)
    advantages = torch.where(kept & (count >= 2), rewards - baseline, 0.0)
    return torch.where(is_constant(rewards, kept), 0.0, advantages)


def rescaled_advantages(
    rewards: torch.Tensor, valid: torch.Tensor | None = None, trained: torch.Tensor | None = None
) -> torch.Tensor:
    """Compare each completion with the mean of its group, times (groups / groups whose rewards differ).

    Groups of equal rewards have no gradient; the factor compensates for their share of the batch. It counts only groups
    that are `trained`, bool [P], because the loss's denominator has no tokens of others; None means all groups with a
    valid completion.

    Source: Chu et al. 2025 (GPG), arXiv:2504.02546.
    """
    kept, count = _kept(rewards, valid)
    trained = count[:, 0] > 0 if trained is None else trained
    num_differing = (trained & ~is_constant(rewards, kept)[:, 0]).sum().clamp(min=1)
    return group_advantages(rewards, "none", valid) * (trained.sum() / num_differing)


def optimal_token_advantages(
    token_rewards: torch.Tensor,
    gradient_norms: torch.Tensor,
    mask: torch.Tensor,
    group_size: int,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compare the return of each token with the baseline of least variance at its position, float [B, T].

    With G[i, t] the reward of completion i from token t on, and W[i, t] its `gradient_norms` up to t:

        A[i, t] = G[i, t] - sum_j W[j, t] G[j, t] / sum_j W[j, t]

    over the completions j of the group that have a token at t, or the mean of their returns if all W are 0. A position
    that only one completion has uses the baseline of the last position that at least two completions have.

    Args:
        token_rewards: float [B, T], the rows of a group next to each other, with prompts of equal length.
        gradient_norms: float [B, T], squared norms of the gradient of log pi by the logits,
            ``1 - 2 pi + sum pi^2``, with pi of the token in the second term and of all tokens in the third.
        mask: bool [B, T].
        group_size: Rows of a group; at least 2.
        weights: float [B, T], a correction's weights of the tokens' losses; norms are multiplied by their squares.

    Source: Li et al. 2026 (optimal token baseline), arXiv:2602.07078, with its logit-gradient proxy.
    """
    shape = (-1, group_size, mask.shape[1])
    is_there = mask.view(shape)
    returns = returns_to_go(token_rewards, mask).view(shape)
    norms = gradient_norms if weights is None else gradient_norms * weights.square()
    # Rounding can make a norm negative. Norms of both signs can cancel, and the baseline would then explode.
    norms = torch.where(mask, norms.clamp(min=0), 0.0).cumsum(1).view(shape)
    norms = torch.where(is_there, norms, 0.0)
    norms = torch.where(norms.any(dim=1, keepdim=True), norms, is_there.to(norms.dtype))
    baseline = (norms * returns).sum(dim=1) / norms.sum(dim=1).clamp(min=torch.finfo(norms.dtype).tiny)
    # The last position, up to this one, that at least two completions have.
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(is_there.sum(dim=1) >= 2, places, -1).cummax(dim=1).values
    baseline = torch.where(last >= 0, baseline.gather(1, last.clamp(min=0)), 0.0)
    # Equal returns must give exactly 0, but rounding can move their weighted mean away from them.
    differs = ~is_constant(returns.transpose(1, 2).flatten(0, 1), is_there.transpose(1, 2).flatten(0, 1))
    differs = differs.view(len(returns), -1).gather(1, last.clamp(min=0)) & (last >= 0)
    return torch.where(is_there & differs[:, None], returns - baseline[:, None], 0.0).view_as(mask)


def batch_advantages(
    rewards: torch.Tensor, valid: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """Compare each completion with the mean of the whole batch, in units of its standard deviation.

    Groups may be single completions.

    Source: Hu 2025 (REINFORCE++), arXiv:2501.03262.
    """
    if rewards.numel() < 2:
        return torch.zeros_like(rewards)
    row_valid = None if valid is None else valid.reshape(1, -1)
    return group_advantages(rewards.reshape(1, -1), valid=row_valid, eps=eps).view_as(rewards)


def returns_to_go(token_rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum the rewards in the mask from each token on, float [B, T]."""
    return torch.where(mask, token_rewards, 0.0).flip(1).cumsum(1).flip(1)


def return_advantages(token_rewards: torch.Tensor, mask: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Compare the return of each token (its reward plus all later rewards) with the mean of the batch.

    `token_rewards` are float [B, T] and `mask` is bool [B, T]. The result is float [B, T], in units of the standard
    deviation of the returns. Mean and deviation weigh all completions equally, independent of their lengths. If only
    last tokens have rewards, the tokens of a completion get its `batch_advantages`.

    Source: Hu 2025 (REINFORCE++), arXiv:2501.03262, where mean and deviation are over tokens.
    """
    returns = returns_to_go(token_rewards, mask)
    weights = mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
    num_rows = mask.any(dim=1).sum()
    if num_rows < 2 or is_constant(returns.view(1, -1), mask.view(1, -1)):
        return torch.zeros_like(token_rewards)
    centred = torch.where(mask, returns - (returns * weights).sum() / num_rows, 0.0)
    variance = (centred.square() * weights).sum() / (num_rows - 1)
    return centred / (variance.sqrt() + eps)


def baseline_advantages(
    rewards: torch.Tensor, baseline: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Compare each completion with a given reward, such as the greedy completion's (ReMax).

    `baseline` is float [P]; if it is NaN, the completions of the prompt get 0.

    Source: Li et al. 2023 (ReMax), arXiv:2310.10505, eq. 5.
    """
    advantages = rewards - baseline[:, None]
    kept = ~advantages.isnan() if valid is None else valid.bool() & ~advantages.isnan()
    return torch.where(kept, advantages, 0.0)


def whiten(x: torch.Tensor, mask: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + eps), with mean and unbiased variance over the masked entries.

    `x` is float of any shape, and `mask` bool or 0/1 of the same shape. Pass the whole batch of a step; the result then
    does not depend on how it is split. The result is 0 outside the mask, and 0 everywhere if the mask has fewer than
    two entries.
    """
    kept = mask.bool()
    count = kept.sum()
    if count < 2:
        return torch.zeros_like(x)
    mean = torch.where(kept, x, 0.0).sum() / count
    centred = torch.where(kept, x - mean, 0.0)
    return centred * torch.rsqrt(centred.square().sum() / (count - 1) + eps)


EQUAL_WITHIN = 1e-6
"""Rewards are equal if they differ by at most this share of the largest: eight rounding steps of float32."""


def is_constant(rewards: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return whether the `kept` rewards [P, G] of a group are equal up to rounding, or absent; bool [P, 1]."""
    highest = torch.where(kept, rewards, -torch.inf).amax(dim=1, keepdim=True)
    lowest = torch.where(kept, rewards, torch.inf).amin(dim=1, keepdim=True)
    return highest - lowest <= EQUAL_WITHIN * torch.maximum(highest.abs(), lowest.abs())


def join_equal(rewards: torch.Tensor, addends: torch.Tensor) -> torch.Tensor:
    """Return the rewards of a group, float [G], with the same value for rewards that are equal up to rounding.

    `addends`, float [N, G], are the summands of the rewards: 100.1 + 0.2 and 100.0 + 0.3 differ by a rounding step of
    their largest summand. NaN stays NaN.
    """
    allowed = EQUAL_WITHIN * addends.nan_to_num().abs().max().item()
    order = rewards.argsort().tolist()
    joined = rewards.tolist()
    for before, index in pairwise(order):
        if joined[index] - joined[before] <= allowed:
            joined[index] = joined[before]
    return torch.tensor(joined, dtype=rewards.dtype)


def _kept(rewards: torch.Tensor, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which completions count, bool [P, G], and their number in each group [P, 1]."""
    if rewards.shape[1] < 2:
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} must have at least 2 completions per prompt to compare."
        )
    kept = ~rewards.isnan() if valid is None else valid.bool() & ~rewards.isnan()
    return kept, kept.sum(dim=1, keepdim=True)


def _sum(rewards: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.where(kept, rewards, 0.0).sum(dim=1, keepdim=True)


def deviation(rewards: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the unbiased standard deviation of all kept rewards."""
    count = kept.sum()
    mean = torch.where(kept, rewards, 0.0).sum() / count.clamp(min=1)
    squares = torch.where(kept, rewards - mean, 0.0).square().sum()
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _choose(n: torch.Tensor, k: int) -> torch.Tensor:
    """Return the number of choices of k out of n, elementwise, float64; 0 if there is none."""
    numbers = [math.comb(size, k) if size >= k >= 0 else 0 for size in n.flatten().tolist()]
    return torch.tensor(numbers, dtype=torch.float64, device=n.device).view(n.shape)


def turn_advantages(
    token_rewards: torch.Tensor, turns: torch.Tensor, mask: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compare the return of each turn with the mean over the other completions that have this turn.

    With G[i, k] the reward of completion i from turn k on, over the completions j other than i that have a turn k:

        A[i, k] = G[i, k] - mean_j G[j, k]

    If no other completion has a turn k, the turn gets the advantage of the last turn that another completion has, or 0
    if there is none. The baseline depends only on other completions and on turns before k. Therefore it does not change
    the mean of the gradient, whenever the policy decides to stop. A mean that includes completion i would change it:
    the share of i is larger if fewer completions have the turn. A completion without others would learn nothing.

    Args:
        token_rewards: float [B, T], the rows of a group next to each other; also rewards of tokens that do not count.
        turns: int64 [B, T], the turn of each token, from 0.
        mask: bool [B, T], the tokens that count.
        group_size: Rows of a group.

    Returns:
        Advantages of S turns, float [P, K, S]; which completions have a turn, bool [P, K, S]; and the returns, float
        [P, K, S].

    Source: Kool et al. 2019 (RLOO) for each turn, as in Ahmadian et al. 2024, arXiv:2402.14740, eq. 7.
    """
    num_turns = int(turns.max()) + 1
    empty = token_rewards.new_zeros(len(mask), num_turns)
    rewards = empty.scatter_add(1, turns, token_rewards)
    has_turn = empty.scatter_add(1, turns, mask.to(empty.dtype)) > 0
    shape = (-1, group_size, num_turns)
    # A completion has all turns before its last one, even if a correction has rejected their tokens.
    has_turn = has_turn.int().flip(1).cummax(1).values.flip(1).bool()
    returns, has_turn = rewards.flip(1).cumsum(1).flip(1).view(shape), has_turn.view(shape)
    kept = torch.where(has_turn, returns, 0.0)
    num_others = has_turn.sum(dim=1, keepdim=True) - has_turn.int()
    others = (kept.sum(dim=1, keepdim=True) - kept) / num_others.clamp(min=1)
    # Equal returns must give exactly 0, but rounding can move their mean away from them.
    by_turn = returns.transpose(1, 2).flatten(0, 1), has_turn.transpose(1, 2).flatten(0, 1)
    is_equal = is_constant(*by_turn).view(len(returns), 1, num_turns)
    compared = torch.where(is_equal, 0.0, returns - others)
    # The last turn, up to this one, that this completion and another one have.
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
    """Scale the results of `turn_advantages` as `group_advantages` scales advantages of completions.

    The first turn gets the advantage relative to a mean that includes the completion itself. The divisor is the
    deviation of the group's advantages, or with ``scale="batch"`` of the returns of all turns. ``scale="none"`` does
    not divide.
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
