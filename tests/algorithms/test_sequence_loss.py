"""Losses of whole completions against hand-worked numbers, slow loops and their laws."""

import math

import pytest
import torch
from random_batch import random_batch

from vectorlm.algorithms.groups import leave_one_out_advantages
from vectorlm.algorithms.policy_loss import proximal_rloo_loss
from vectorlm.algorithms.preference import copg_loss


def groups():
    generator = torch.Generator().manual_seed(0)
    policy, reference, rewards = (
        torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    return policy.requires_grad_(), reference, rewards


def test_proximal_rloo_by_hand():
    old = torch.zeros(2, 2, dtype=torch.float64)
    policy = torch.tensor([[1.5, 1.1], [0.5, 9.0]], dtype=torch.float64).log()
    mask = torch.tensor([[1, 1], [1, 0]])
    found = proximal_rloo_loss(policy, old, torch.tensor([1.0, -1.0], dtype=torch.float64), mask)
    assert found.tolist() == pytest.approx([-1.2, 0.8])


def test_proximal_rloo_equals_a_slow_loop():
    policy, old, advantages, mask = random_batch()
    found = proximal_rloo_loss(policy, old, advantages[:, 0], mask)
    for b in range(len(policy)):
        r = math.exp(sum((policy[b, t] - old[b, t]).item() for t in range(policy.shape[1]) if mask[b, t]))
        a = advantages[b, 0].item()
        assert found[b].item() == pytest.approx(-min(r * a, min(max(r, 0.8), 1.2) * a), rel=1e-12)


def test_proximal_rloo_at_ratio_one_is_the_policy_gradient_of_the_completion():
    policy, _, advantages, mask = random_batch()
    proximal_rloo_loss(policy, policy.detach(), advantages[:, 0], mask).sum().backward()
    torch.testing.assert_close(policy.grad, -advantages[:, :1] * mask, rtol=1e-12, atol=1e-12)


def test_proximal_rloo_has_the_gradient_of_finite_differences():
    policy, old, advantages, mask = random_batch()
    assert torch.autograd.gradcheck(lambda p: proximal_rloo_loss(p, old, advantages[:, 0], mask), (policy,))


def test_copg_of_a_pair_by_hand():
    policy, reference = torch.tensor([[-2.0, -3.0]]), torch.tensor([[-2.5, -2.0]])
    # R = 1 - 0.5 * 0.5, 0 - 0.5 * -1; (0.75 - 0.5)^2 / (2 * 0.5)
    assert copg_loss(policy, reference, torch.tensor([[1.0, 0.0]]), beta=0.5).tolist() == [0.0625]


def test_copg_equals_a_slow_loop():
    policy, reference, rewards = groups()
    rewards[1, 2] = math.nan
    found = copg_loss(policy, reference, rewards, beta=0.3)
    for p in range(3):
        kept = [i for i in range(4) if not math.isnan(rewards[p, i])]
        r = {i: (rewards[p, i] - 0.3 * (policy[p, i] - reference[p, i])).item() for i in kept}
        pairs = [(i, j) for i in kept for j in kept if i < j]
        expected = sum((r[i] - r[j]) ** 2 for i, j in pairs) / (2 * 0.3 * (len(kept) - 1))
        assert found[p].item() == pytest.approx(expected, rel=1e-12)


def test_the_gradient_of_copg_is_leave_one_out_with_the_penalty_in_the_reward():
    policy, reference, rewards = groups()
    (gradient,) = torch.autograd.grad(copg_loss(policy, reference, rewards, 0.3).sum(), policy)
    penalised = rewards - 0.3 * (policy.detach() - reference)
    torch.testing.assert_close(gradient, -leave_one_out_advantages(penalised), rtol=1e-10, atol=1e-12)


def test_copg_without_a_pair_is_zero():
    policy, reference, rewards = groups()
    valid = torch.zeros(3, 4, dtype=torch.bool)
    valid[:, 0] = True
    assert copg_loss(policy, reference, rewards, 0.3, valid).tolist() == [0.0, 0.0, 0.0]


def test_copg_has_the_gradient_of_finite_differences():
    policy, reference, rewards = groups()
    assert torch.autograd.gradcheck(lambda p: copg_loss(p, reference, rewards, 0.3), (policy,))


def test_copg_needs_a_penalty():
    with pytest.raises(ValueError, match="beta=0"):
        copg_loss(*groups(), beta=0)
