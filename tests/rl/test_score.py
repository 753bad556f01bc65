"""From rewards to advantages: where a reward stands, what the KL penalty takes from it, what the critic learns."""

from dataclasses import replace

import pytest
import torch
from rank_processes import on_ranks, save_tiny_llama
from tiny_rl import build, random_groups, random_rewards, select

from vectorlm.algorithms import gae_advantages, leave_one_out_advantages, whiten
from vectorlm.rl.score import rewards_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("policy") / "model")


def assess(topology, folder, algorithm, kl_in):
    spec, assessor, _ = build(topology, folder, algorithm, kl_coef=0.3)
    assessor = replace(assessor, kl_in=kl_in, kl_kind="k1", whitens=False)
    with torch.no_grad():
        # A policy that has left its reference.
        for parameter in assessor.policy.model.parameters():
            parameter.mul_(1.2)
    rows = select(spec, random_groups(), random_rewards())
    return rows, assessor.assess(rows, None, 0.3)


def test_the_reward_stands_on_the_last_token_that_the_policy_chose():
    from vectorlm.algorithms.registry import get_algorithm

    groups, rewards = random_groups(), random_rewards()
    rows = select(get_algorithm("grpo"), groups, rewards)
    placed = rewards_of(rows)
    for row, rollout in enumerate(rollout for group in groups for rollout in group):
        reward = rewards.flatten()[row]
        if reward.isnan():
            assert placed[row].eq(0).all()
            continue
        last = max(index for index, is_policy in enumerate(rollout.policy_mask) if is_policy)
        assert placed[row].nonzero().tolist() == [[len(rollout.prompt_token_ids) + last]]
        assert placed[row].sum() == reward


def test_a_penalty_in_the_reward_changes_what_completions_are_compared_by(folder):
    for rows, batch in on_ranks(2, assess, folder, "rloo", "reward"):
        divergence = torch.where(rows.mask, batch.old_logprobs - batch.reference_logprobs, 0.0)
        assert divergence.abs().max() > 0.01
        expected = rows.rewards - 0.3 * divergence.sum(dim=1).view_as(rows.rewards)
        torch.testing.assert_close(batch.rewards, expected, equal_nan=True)
        advantages = leave_one_out_advantages(expected, rows.valid).view(-1, 1)
        torch.testing.assert_close(batch.advantages, torch.where(rows.mask, advantages, 0.0))


def test_a_penalty_in_the_loss_leaves_the_reward_alone(folder):
    for rows, batch in on_ranks(2, assess, folder, "rloo", "loss"):
        torch.testing.assert_close(batch.rewards, rows.rewards, equal_nan=True)
        assert batch.reference_logprobs is not None


def test_gae_takes_the_penalty_token_by_token_and_the_critic_learns_unwhitened_returns(folder):
    (first, batch), (second, other) = on_ranks(2, assess, folder, "ppo", "reward")
    divergence = torch.where(first.mask, batch.old_logprobs - batch.reference_logprobs, 0.0)
    rewards = rewards_of(first) - 0.3 * divergence
    assert batch.values.eq(0).all(), "a new critic says nothing"
    advantages, returns = gae_advantages(rewards, batch.values, first.mask, 1.0, 1.0)
    torch.testing.assert_close(batch.advantages, advantages)
    torch.testing.assert_close(batch.returns, returns)
    for name in ("advantages", "old_logprobs", "reference_logprobs", "returns"):
        assert torch.equal(getattr(batch, name), getattr(other, name)), "ranks disagree"
    assert whiten(advantages, first.mask).std() > 0
    assert torch.equal(first.mask, second.mask)
