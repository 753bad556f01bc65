"""From rewards to advantages: the position of rewards, the KL penalty, and the critic's targets."""

import pytest
import torch
from kit.rank_processes import on_ranks
from tiny_rl import BY_KIND, build, leave_reference, random_groups, random_rewards, random_rows

from vectorlm.algorithms.critic import gae_advantages
from vectorlm.algorithms.groups import leave_one_out_advantages, whiten
from vectorlm.algorithms.logprobs import token_values
from vectorlm.algorithms.registry import get_algorithm
from vectorlm.rl.prepare import _gradient_norms, _highest
from vectorlm.rl.settings import KLSettings


def prepare(topology, folder, algorithm, kl_in):
    kl = KLSettings(kl_coef=0.3, kl_in=kl_in, kl_kind="k1")
    more = {"hyperparameters": {"whiten_advantages": False}, "has_reference": True}
    run, rows = leave_reference(build(topology, folder, algorithm, kl=kl, **more)), random_rows(algorithm)
    return rows, run.prepare(rows, 0.3)


def test_the_reward_stands_on_the_last_token_that_the_policy_chose():
    groups, rewards = random_groups(), random_rewards()
    placed = random_rows("grpo").token_rewards
    for row, rollout in enumerate(rollout for group in groups for rollout in group):
        reward = rewards.flatten()[row]
        if reward.isnan():
            assert placed[row].eq(0).all()
            continue
        last = max(index for index, is_policy in enumerate(rollout.policy_mask) if is_policy)
        assert placed[row].nonzero().tolist() == [[len(rollout.prompt_token_ids) + last]]
        assert placed[row].sum() == reward


def test_a_penalty_in_the_reward_changes_what_completions_are_compared_by(folder):
    for rows, batch in on_ranks(2, prepare, folder, "rloo", "reward"):
        divergence = torch.where(rows.mask, batch.old_logprobs - batch.reference_logprobs, 0.0)
        assert divergence.abs().max() > 0.01
        expected = rows.rewards - 0.3 * divergence.sum(dim=1).view_as(rows.rewards)
        torch.testing.assert_close(batch.rows.rewards, expected, equal_nan=True)
        advantages = leave_one_out_advantages(expected, rows.valid).view(-1, 1)
        torch.testing.assert_close(batch.advantages, torch.where(rows.mask, advantages, 0.0))


def test_reinforce_pp_charges_each_token_the_penalty_from_there_on(folder):
    """A loop computes the returns; mean and standard deviation weigh all completions equally."""
    for rows, batch in on_ranks(2, prepare, folder, "reinforce_pp", "reward"):
        rewards = rows.token_rewards - 0.3 * (batch.old_logprobs - batch.reference_logprobs)
        returns, values, weights = torch.zeros_like(rewards).double(), [], []
        for row in range(len(rewards)):
            places = rows.mask[row].nonzero()[:, 0].tolist()
            for place in places:
                returns[row, place] = sum(float(rewards[row, later]) for later in places if later >= place)
                values.append(float(returns[row, place]))
                weights.append(1 / len(places))
        count = sum(weights)
        mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / count
        squares = sum(weight * (value - mean) ** 2 for weight, value in zip(weights, values, strict=True))
        expected = torch.where(rows.mask, (returns - mean) / (squares / (count - 1)) ** 0.5, 0.0)
        torch.testing.assert_close(batch.advantages.double(), expected, rtol=1e-4, atol=1e-5)
        assert any(len(set(row[kept].tolist())) > 1 for row, kept in zip(returns, rows.mask, strict=True))


def test_a_penalty_in_the_loss_leaves_the_reward_alone(folder):
    for rows, batch in on_ranks(2, prepare, folder, "rloo", "loss"):
        torch.testing.assert_close(batch.rows.rewards, rows.rewards, equal_nan=True)
        assert batch.reference_logprobs is not None


def test_gae_takes_the_penalty_token_by_token_and_the_critic_learns_unwhitened_returns(folder):
    (first, batch), (second, other) = on_ranks(2, prepare, folder, "ppo", "reward")
    divergence = torch.where(first.mask, batch.old_logprobs - batch.reference_logprobs, 0.0)
    rewards = first.token_rewards - 0.3 * divergence
    assert batch.rows.values.eq(0).all(), "a new critic says nothing"
    advantages, returns = gae_advantages(rewards, batch.rows.values, first.mask, 1.0, 1.0)
    torch.testing.assert_close(batch.advantages, advantages)
    torch.testing.assert_close(batch.returns, returns)
    for name in ("advantages", "old_logprobs", "reference_logprobs", "returns"):
        assert torch.equal(getattr(batch, name), getattr(other, name)), "ranks disagree"
    assert whiten(advantages, first.mask).std() > 0
    assert torch.equal(first.mask, second.mask)


def test_the_tokens_of_highest_entropy_are_those_above_the_interpolated_quantile():
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 10, 11, 37):
        entropies = torch.rand(1, n, generator=generator, dtype=torch.float64)
        for share in (0.05, 0.2, 0.5, 0.8, 0.95):
            expected = entropies >= torch.quantile(entropies, 1 - share)
            found = _highest(entropies, torch.ones(1, n, dtype=torch.bool), share)
            assert torch.equal(found, expected), (n, share)


def advantages_of_all(topology, folder, algorithms):
    """Return the advantages of each algorithm with and without truncated completions, and the masks."""
    found, kl = {}, KLSettings(kl_coef=0.3, kl_in="reward", kl_kind="k1")
    for algorithm in algorithms:
        if get_algorithm(algorithm).chooses:
            continue  # This algorithm chooses only among completions that are not truncated.
        run = leave_reference(build(topology, folder, algorithm, kl=kl, has_reference=True))
        batches = [run.prepare(random_rows(algorithm, drops), 0.3) for drops in (False, True)]
        found[algorithm] = [(batch.advantages, batch.rows.mask) for batch in batches]
    return found


@pytest.mark.parametrize("algorithms", BY_KIND)
def test_completions_that_the_loss_leaves_out_stay_in_every_baseline(folder, algorithms):
    """In baselines they have the penalty in their reward, as all other completions do."""
    truncated = [rollout.finish_reason == "length" for group in random_groups() for rollout in group]
    assert any(truncated)
    ((found),) = on_ranks(1, advantages_of_all, folder, algorithms)
    assert len(found) >= len(algorithms) - 2
    for algorithm, ((whole, mask), (dropped, trained)) in found.items():
        assert torch.equal(trained, mask & ~torch.tensor(truncated)[:, None]), algorithm
        torch.testing.assert_close(dropped, torch.where(trained, whole, 0.0), msg=algorithm)


def test_norms_of_gradients_are_right_for_tokens_of_probability_near_one():
    scores = torch.randn(400, 50, generator=torch.Generator().manual_seed(0))
    scores[:, 0] = torch.linspace(0.0, 20.0, 400)
    targets = torch.zeros(400, dtype=torch.int64)
    found = token_values(scores, targets, entropy="collision")
    norms = _gradient_norms(found.logprobs, found.entropies).double()
    gradients = torch.nn.functional.one_hot(targets, 50) - torch.softmax(scores.double(), -1)
    exact = gradients.square().sum(-1)
    # The part of the other tokens, at most half, is lost in rounding; 1 - p keeps a rounding step of log p.
    uncertain = exact > 1e-4
    torch.testing.assert_close(norms[uncertain], exact[uncertain], rtol=2e-2, atol=0)
    assert (norms >= 0).all()
    assert ((norms.sqrt() - exact.sqrt()).abs() <= 0.5 * exact.sqrt() + 1.2e-7).all()
