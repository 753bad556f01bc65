"""Generalised advantage estimation and the critic's loss: hand-worked numbers, slow loops and invariants."""

import pytest
import torch
from random_batch import places, random_batch

from vectorlm.algorithms.critic import gae_advantages, value_loss


def slow_gae(rewards, values, mask, gamma, lam):
    """Compute the definition: a discounted sum of temporal differences over the tokens in the mask."""
    advantages = torch.zeros_like(values)
    for b in range(len(rewards)):
        kept = [t for t in range(rewards.shape[1]) if mask[b, t]]
        for i in range(len(kept)):
            total = 0.0
            for k in range(i, len(kept)):
                following = float(values[b, kept[k + 1]]) if k + 1 < len(kept) else 0.0
                delta = float(rewards[b, kept[k]]) + gamma * following - float(values[b, kept[k]])
                total += (gamma * lam) ** (k - i) * delta
            advantages[b, kept[i]] = total
    return advantages, torch.where(mask, advantages + values, 0.0)


def test_advantages_by_hand():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.25, 0.5]])
    advantages, returns = gae_advantages(rewards, values, torch.ones(1, 3), gamma=0.5, lam=0.5)
    # delta = -0.375, 0, 0.5; A = 0.5, 0 + 0.25 * 0.5, -0.375 + 0.25 * 0.125
    assert advantages.tolist() == [[-0.34375, 0.125, 0.5]]
    assert returns.tolist() == [[0.15625, 0.375, 1.0]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)])
def test_advantages_equal_the_definition(gamma, lam):
    values, rewards, _, mask = random_batch()
    found = gae_advantages(rewards, values, mask, gamma, lam)
    for mine, slow in zip(found, slow_gae(rewards, values.detach(), mask, gamma, lam), strict=True):
        torch.testing.assert_close(mine, slow, rtol=1e-12, atol=1e-12)
        assert not mine.requires_grad


def test_text_of_a_tool_between_turns_changes_nothing():
    rewards, values = torch.tensor([[0.1, 0.2, 1.0]]), torch.tensor([[0.5, 0.4, 0.3]])
    plain = gae_advantages(rewards, values, torch.ones(1, 3), 0.9, 0.7)
    place = torch.tensor([0, 3, 5])
    wide_rewards, wide_values, mask = (
        torch.full((1, 6), 7.0),
        torch.full((1, 6), torch.nan),
        torch.zeros(1, 6),
    )
    wide_rewards[:, place], wide_values[:, place], mask[:, place] = rewards, values, torch.ones(1, 3)
    wide = gae_advantages(wide_rewards, wide_values, mask, 0.9, 0.7)
    for mine, expected in zip(wide, plain, strict=True):
        assert torch.equal(mine[:, place], expected)
        assert mine[:, [1, 2, 4]].eq(0).all()


def test_the_value_loss_by_hand():
    values, old, returns = (
        torch.tensor([[1.0, 2.0, 0.0]]),
        torch.tensor([[0.0, 2.0, 0.0]]),
        torch.tensor([[1.0, 0.0, 3.0]]),
    )
    # The first value moved by 1 and may move by 0.5: the loss is (0.5 - 1)^2, not 0.
    assert value_loss(values, old, returns, 0.5).tolist() == [[0.125, 2.0, 4.5]]
    assert value_loss(values, old, returns, None).tolist() == [[0.0, 2.0, 4.5]]


def test_the_value_loss_equals_a_slow_loop():
    values, old, returns, _ = random_batch()
    found = value_loss(values, old, returns, 0.2)
    for mine, v, o, r in places(found, values, old, returns):
        clipped = o + min(max(v - o, -0.2), 0.2)
        assert mine == pytest.approx(0.5 * max((v - r) ** 2, (clipped - r) ** 2), rel=1e-12)


def test_gradient_of_the_value_loss():
    values, old, returns, _ = random_batch()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, 0.2), (values,))
