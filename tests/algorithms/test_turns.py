"""Rewards of turns: returns from each turn on, with a baseline that adds nothing to the mean of the gradient."""

import itertools

import pytest
import torch

from vectorlm.algorithms.batch import RolloutBatch, place_rewards
from vectorlm.algorithms.groups import (
    group_advantages,
    leave_one_out_advantages,
    scaled_as_groups,
    turn_advantages,
)
from vectorlm.algorithms.registry import get_algorithm

EXACT = {"rtol": 0, "atol": 1e-12}

# A game of two turns: stop, or pay to go on and then guess. By outcome: its turns' choices and their rewards.
OUTCOMES = [((0,), (0.3,)), ((1, 0), (-0.2, 1.0)), ((1, 1), (-0.2, 0.1))]


def log_probability(logits, choices):
    return sum(torch.log_softmax(logits[turn], dim=0)[choice] for turn, choice in enumerate(choices))


def rows_of(outcomes):
    """Return token rewards, turns and mask of a group; each turn is a token, with one of the tool's in between."""
    rewards, turns = torch.zeros(len(outcomes), 3, dtype=torch.float64), torch.tensor([[0, 1, 1]])
    mask = torch.zeros(len(outcomes), 3, dtype=torch.bool)
    for row, (choices, of_turns) in enumerate(outcomes):
        for place, reward in zip((0, 2), of_turns[: len(choices)], strict=False):
            rewards[row, place], mask[row, place] = reward, True
    return rewards, turns.expand(len(outcomes), 3), mask


def alone_included(rewards, turns, mask, group_size):
    """Return what a mean over all completions that came so far gives, the completion itself included."""
    returns = torch.where(mask, rewards, 0.0).flip(1).cumsum(1).flip(1)
    mean = torch.where(mask, returns, 0.0).sum(0) / mask.sum(0).clamp(min=1)
    return torch.where(mask, returns - mean, 0.0)


def by_token(rewards, turns, mask, group_size):
    advantages, *_ = turn_advantages(rewards, turns, mask, group_size)
    return torch.where(mask, advantages.flatten(0, 1).gather(1, torch.where(mask, turns, 0)), 0.0)


def mean_gradients(advantages_of, group_size, logits):
    """Return the mean over all groups of the gradient that a loss takes, and the gradient of the mean reward."""
    expected = torch.zeros_like(logits)
    value = sum(log_probability(logits, choices).exp() * sum(of_turns) for choices, of_turns in OUTCOMES)
    (true,) = torch.autograd.grad(value, logits)
    for group in itertools.product(OUTCOMES, repeat=group_size):
        chance = torch.stack([log_probability(logits, choices) for choices, _ in group]).sum().exp().item()
        advantages = advantages_of(*rows_of(group), group_size)
        surrogate = sum(
            advantages[row, 2 * turn] * torch.log_softmax(logits[turn], dim=0)[choice]
            for row, (choices, _) in enumerate(group)
            for turn, choice in enumerate(choices)
        )
        (gradient,) = torch.autograd.grad(surrogate, logits)
        expected += chance * gradient / group_size
    return expected, true


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_gradient_is_that_of_the_mean_reward_although_the_policy_decides_when_to_stop(
    group_size, seed
):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 2, generator=generator, dtype=torch.float64).requires_grad_()
    found, true = mean_gradients(by_token, group_size, logits)
    torch.testing.assert_close(found, true, **EXACT)
    biased, _ = mean_gradients(alone_included, group_size, logits)
    # It is not a multiple either: each turn is off by another factor.
    factors = (biased / true)[:, 0]
    assert abs(factors[0] - factors[1]) > 1e-3


def test_one_turn_is_what_groups_of_completions_give():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    rewards[2] = 0.7
    mask = torch.ones(20, 2, dtype=torch.bool)
    placed = torch.zeros(20, 2, dtype=torch.float64)
    placed[:, 1] = rewards.view(-1)
    found, *more = turn_advantages(placed, torch.zeros(20, 2, dtype=torch.int64), mask, 4)
    torch.testing.assert_close(found[..., 0], leave_one_out_advantages(rewards), **EXACT)
    for scale in ("group", "batch", "none"):
        torch.testing.assert_close(
            scaled_as_groups(found, *more, scale)[..., 0], group_advantages(rewards, scale), **EXACT
        )


def test_a_completion_that_went_on_alone_keeps_the_advantage_of_its_last_turn_in_company():
    rewards = torch.tensor([[0.0, 0.0, 5.0], [1.0, 0.0, 0.0]])
    mask = torch.tensor([[True, False, True], [True, False, False]])
    found, has_turn, _ = turn_advantages(rewards, torch.tensor([[0, 1, 1]] * 2), mask, 2)
    assert found.tolist() == [[[4.0, 4.0], [-4.0, 0.0]]]
    assert has_turn.tolist() == [[[True, True], [True, False]]]
    # A completion that counts nowhere leaves nobody to compare with.
    found, *_ = turn_advantages(
        rewards, torch.tensor([[0, 1, 1]] * 2), mask & torch.tensor([[True], [False]]), 2
    )
    assert not found.any()


def test_rewards_of_turns_stay_with_their_turns_and_the_rest_comes_at_the_end():
    mask = torch.tensor([[False, True, True, False, True]])
    of_turns = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.25]])
    total = torch.tensor([[1.0]])
    assert place_rewards(mask, total, of_turns).tolist() == [[0.0, 0.0, 0.5, 0.0, 0.5]]
    # Without the end of the first turn, the reward goes to what is left of it; without the turn, to nobody.
    mask[0, 2] = False
    assert place_rewards(mask, total, of_turns).tolist() == [[0.0, 0.5, 0.0, 0.0, 0.5]]
    mask[0, 1] = False
    assert place_rewards(mask, total, of_turns).tolist() == [[0.0, 0.0, 0.0, 0.0, 0.5]]


def batch_of(turns, turn_rewards):
    mask = torch.tensor([[True, False, True], [True, False, False]])
    rewards = torch.tensor([[2.0, 1.0]])
    return RolloutBatch(
        torch.zeros(2, 3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.int64),
        mask,
        torch.zeros(2, 3),
        rewards,
        torch.ones(1, 2, dtype=torch.bool),
        torch.tensor([[0, 1]]),
        place_rewards(mask, rewards, turn_rewards),
        values=torch.zeros(2, 3),
        turns=turns,
        turn_rewards=turn_rewards,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Totals of 2 and 1; the first row had 1.5 for its first turn, and goes on alone.
        ("rloo", [[1.0, 0.0, 1.0], [-1.0, 0.0, 0.0]]),
        ("dr_grpo", [[0.5, 0.0, 0.5], [-0.5, 0.0, 0.0]]),
        ("gpg", [[0.5, 0.0, 0.5], [-0.5, 0.0, 0.0]]),
        # The returns of the three turns are 2, 0.5 and 1, with the deviation 0.764 about their mean.
        ("lite_ppo", [[0.6547, 0.0, 0.6547], [-0.6547, 0.0, 0.0]]),
        ("reinforce", [[2.0, 0.0, 0.5], [1.0, 0.0, 0.0]]),
        ("ppo", [[2.0, 0.0, 0.5], [1.0, 0.0, 0.0]]),
    ],
)
def test_what_an_algorithm_learns_from_rewards_of_turns(name, expected):
    spec = get_algorithm(name)
    turns, turn_rewards = torch.tensor([[0, 1, 1]] * 2), torch.tensor([[1.5, 0.0, 0.0], [0.0] * 3])
    found = spec.advantages(batch_of(turns, turn_rewards), spec.settings)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_a_completion_whose_first_turn_was_rejected_is_compared_in_the_turns_that_it_has():
    """Its later turn, which no other has, is compared as the first one is; the tokens of that are in no mask."""
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.25, 0.0, 0.0], [0.5, 0.0, 0.0]], dtype=torch.float64)
    turns = torch.tensor([[0, 1, 1]]).expand(3, 3)
    mask = torch.tensor([[False, False, True], [True, False, False], [True, False, False]])
    found = by_token(rewards, turns, mask, 3)
    assert found[mask].tolist() == [1.0 - 0.375, 0.25 - 0.75, 0.5 - 0.625]
