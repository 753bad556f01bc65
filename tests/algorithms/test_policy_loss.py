"""Policy losses against hand-worked numbers, slow loops, their invariants and their gradients."""

import math
import statistics

import pytest
import torch
from random_batch import places, random_batch

from vectorlm.algorithms.groups import leave_one_out_advantages
from vectorlm.algorithms.kl import binary_divergence
from vectorlm.algorithms.policy_loss import (
    cispo_policy_loss,
    covariances,
    dppo_policy_loss,
    drawn_between,
    gmpo_policy_loss,
    highest,
    kl_cov_loss,
    ppo_policy_loss,
    proximal_rloo_loss,
    reinforce_policy_loss,
    sapo_policy_loss,
    vespo_policy_loss,
)
from vectorlm.algorithms.preference import bradley_terry_loss, copg_loss, online_dpo_loss

LOSSES = {
    "ppo": ppo_policy_loss,
    "ppo dual": lambda *args: ppo_policy_loss(*args, dual_clip=1.5),
    "cispo": cispo_policy_loss,
    "sapo": sapo_policy_loss,
    "reinforce": lambda policy, old, advantages: reinforce_policy_loss(policy, advantages),
}


def slow_ppo(policy, old, advantage, low=0.2, high=0.2, dual=None):
    r = math.exp(policy - old)
    value = -min(r * advantage, min(max(r, 1 - low), 1 + high) * advantage)
    return min(value, -dual * advantage) if dual is not None and advantage < 0 else value


def slow_sapo(policy, old, advantage):
    tau = 1.0 if advantage > 0 else 1.05
    return -advantage * 4 / tau / (1 + math.exp(-tau * (math.exp(policy - old) - 1)))


SLOW = {
    "ppo": slow_ppo,
    "ppo dual": lambda *args: slow_ppo(*args, dual=1.5),
    "cispo": lambda p, o, a: -min(max(math.exp(p - o), 0.0), 1.2) * a * p,
    "sapo": slow_sapo,
    "reinforce": lambda p, o, a: -a * p,
}


@pytest.mark.parametrize("name", LOSSES)
def test_equals_a_slow_loop(name):
    policy, old, advantages, _ = random_batch()
    found = LOSSES[name](policy, old, advantages)
    for mine, *numbers in places(found, policy, old, advantages):
        assert mine == pytest.approx(SLOW[name](*numbers), rel=1e-12, abs=1e-12)


def test_hand_worked_clipping():
    old = torch.zeros(1, 4, dtype=torch.float64)
    policy = torch.tensor([[1.5, 1.5, 0.5, 0.5]], dtype=torch.float64).log()
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    assert ppo_policy_loss(policy, old, advantages)[0].tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8])
    found = ppo_policy_loss(policy, old, advantages, clip_low=0.1, clip_high=0.4, dual_clip=1.2)
    assert found[0].tolist() == pytest.approx([-1.4, 1.2, -0.5, 0.9])


@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(name):
    policy, _, advantages, _ = random_batch()
    LOSSES[name](policy, policy.detach(), advantages).sum().backward()
    torch.testing.assert_close(policy.grad, -advantages, rtol=1e-12, atol=1e-12)


# CISPO and GSPO stop a gradient on purpose; separate tests below cover them.
@pytest.mark.parametrize("name", ["ppo", "ppo dual", "sapo", "reinforce"])
def test_gradients_are_those_of_finite_differences(name):
    policy, old, advantages, _ = random_batch()
    assert torch.autograd.gradcheck(lambda p: LOSSES[name](p, old, advantages), (policy,))


def test_no_token_of_cispo_loses_its_gradient():
    policy, old, advantages, _ = random_batch()
    cispo_policy_loss(policy, old - 3, advantages).sum().backward()
    torch.testing.assert_close(policy.grad, -1.2 * advantages)
    policy.grad = None
    ppo_policy_loss(policy, old - 3, advantages.abs()).sum().backward()
    assert policy.grad.eq(0).all()


def test_gspo_summed_over_a_row_has_the_gradient_of_the_rows_ratio():
    policy, old, _, mask = random_batch()
    policy, old, mask = policy[:1].detach().requires_grad_(), old[:1], mask[:1]
    advantages = torch.full_like(old, 0.7)
    loss = ppo_policy_loss(policy, old, advantages, 10.0, 10.0, level="sequence", mask=mask)
    (mine,) = torch.autograd.grad((loss * mask).sum() / mask.sum(), policy)
    row = torch.exp(((policy - old) * mask).sum() / mask.sum())
    (expected,) = torch.autograd.grad(-0.7 * row, policy)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_gspo_ignores_what_stands_outside_the_mask():
    policy, old, advantages, mask = random_batch()
    spoilt = torch.where(mask, old, torch.nan)
    plain = ppo_policy_loss(policy, old, advantages, level="sequence", mask=mask)
    assert torch.equal(ppo_policy_loss(policy, spoilt, advantages, level="sequence", mask=mask), plain)


def test_extreme_ratios_stay_finite():
    policy = torch.tensor([[0.0, -1000.0]], dtype=torch.float32, requires_grad=True)
    for loss in LOSSES.values():
        value = loss(policy, torch.tensor([[-1000.0, 0.0]]), torch.tensor([[-1.0, -1.0]]))
        assert value.isfinite().all()
        (gradient,) = torch.autograd.grad(value.sum(), policy)
        assert gradient.isfinite().all()


def test_gradient_flows_through_the_policy_alone():
    policy, old, advantages, mask = random_batch()
    old, advantages = old.requires_grad_(), advantages.requires_grad_()
    for loss in LOSSES.values():
        loss(policy, old, advantages).sum().backward()
    ppo_policy_loss(policy, old, advantages, level="sequence", mask=mask).sum().backward()
    assert old.grad is None
    assert advantages.grad is None


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"level": "row"}, "level"),
        ({"level": "sequence"}, "mask"),
    ],
)
def test_refusals(more, name):
    policy, old, advantages, _ = random_batch()
    with pytest.raises(ValueError, match=name):
        ppo_policy_loss(policy, old, advantages, **more)


@pytest.mark.parametrize("name", ["ppo", "cispo", "sapo"])
def test_at_the_level_of_sequences_all_tokens_of_a_row_have_its_ratio(name):
    policy, old, _, mask = random_batch()
    # PPO clips the first row from below and the fourth from above.
    old = old + torch.tensor([[0.5], [0.0], [0.0], [-0.5], [0.0]])
    advantages = torch.linspace(-1, 1, len(policy), dtype=torch.float64)[:, None].expand_as(policy)
    loss = LOSSES[name]
    found = loss(policy, old, advantages, level="sequence", mask=mask)
    for b in range(len(policy) - 1):
        gaps = [(policy[b, t] - old[b, t]).item() for t in range(policy.shape[1]) if mask[b, t]]
        mean, a = sum(gaps) / len(gaps), advantages[b, 0].item()
        for t in range(policy.shape[1]):
            p = policy[b, t].item()
            expected = SLOW[name](p, p - mean, a)
            assert found[b, t].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    # With the straight-through gradient, SAPO at ratio 1 has the plain policy gradient, as CISPO always has.
    policy.grad = None
    loss(policy, policy.detach(), advantages, level="sequence", mask=mask).sum().backward()
    torch.testing.assert_close(policy.grad, -advantages, rtol=1e-12, atol=1e-12)


def test_gmpo_equals_a_slow_loop():
    policy, old, _, mask = random_batch()
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0, 1.0], dtype=torch.float64)
    found = gmpo_policy_loss(policy, old, advantages, mask, 0.1, 0.2)
    num_clipped = 0
    for b in range(len(policy)):
        a, logs = advantages[b].item(), []
        for t in range(policy.shape[1]):
            if mask[b, t]:
                r = math.exp((policy[b, t] - old[b, t]).item())
                # The paper's pseudocode takes the smaller of r^sign and its clipped form, with the sign of A.
                sign = 1 if a > 0 else -1
                clipped = min(max(r, 0.9), 1.2)
                num_clipped += sign * math.log(clipped) < sign * math.log(r)
                logs.append(sign * min(sign * math.log(r), sign * math.log(clipped)))
        expected = -a * math.exp(sum(logs) / len(logs)) if logs else -a
        assert found[b].item() == pytest.approx(expected, rel=1e-12)
    assert num_clipped > 3
    assert torch.autograd.gradcheck(lambda p: gmpo_policy_loss(p, old, advantages, mask, 0.1, 0.2), (policy,))


def slow_divergence(p, q, kind):
    return abs(p - q) if kind == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


@pytest.mark.parametrize(("kind", "bound"), [("tv", 0.1), ("bernoulli_kl", 0.03)])
def test_dppo_equals_a_slow_loop(kind, bound):
    policy, old, advantages, _ = random_batch()
    found = dppo_policy_loss(policy, old, advantages, bound, kind)
    found.sum().backward()
    distances = binary_divergence(policy, old, kind)
    num_blocked = 0
    for log_p, log_q, a, distance, loss, gradient in places(
        policy, old, advantages, distances, found, policy.grad
    ):
        p, q = math.exp(log_p), math.exp(log_q)
        far = slow_divergence(p, q, kind)
        assert distance == pytest.approx(far, abs=1e-12)
        is_blocked = far > bound and ((a > 0 and p > q) or (a < 0 and p < q))
        num_blocked += is_blocked
        weight = 0.0 if is_blocked else min(p / q, 20.0)
        assert loss == pytest.approx(-weight * a * log_p, abs=1e-12)
        assert gradient == pytest.approx(-weight * a, abs=1e-12)
    assert 3 < num_blocked < 30


def test_dppo_lets_rare_tokens_go_where_a_ratio_would_not():
    old = torch.tensor([[1e-4, 0.9]], dtype=torch.float64).log()
    policy = torch.tensor([[1e-2, 0.6]], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    dppo_policy_loss(policy, old, advantages).sum().backward()
    # The first token's probability grows a hundredfold, but only by 0.01; the second's falls by a third, by 0.3.
    assert policy.grad.tolist() == [[-20.0, 0.0]]


@pytest.mark.parametrize("log_weights", [None, torch.linspace(-0.5, 0.3, 5, dtype=torch.float64)])
def test_vespo_equals_a_slow_loop(log_weights):
    """If a correction weighs the rows, VESPO's ratio is the ratio to the sampler."""
    policy, old, _, mask = random_batch()
    advantages = torch.linspace(-1, 1, len(policy), dtype=torch.float64)[:, None].expand_as(policy)
    found = vespo_policy_loss(policy, old, advantages, mask, log_weights=log_weights)
    found.sum().backward()
    for b in range(len(policy)):
        a = advantages[b, 0].item()
        gaps = [(policy[b, t] - old[b, t]).item() for t in range(policy.shape[1]) if mask[b, t]]
        w = math.exp(sum(gaps) + (0.0 if log_weights is None else log_weights[b].item()))
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        weight = w**k * math.exp(rate * (1 - w))
        for t in range(policy.shape[1]):
            expected = pytest.approx(-weight * a * policy[b, t].item(), rel=1e-12, abs=1e-12)
            assert found[b, t].item() == expected
            assert policy.grad[b, t].item() == pytest.approx(-weight * a, rel=1e-12, abs=1e-12)


def test_vespo_fades_on_both_sides_and_stays_finite():
    old = torch.zeros(3, 1, dtype=torch.float64)
    policy = torch.tensor([[-50.0], [0.0], [50.0]], dtype=torch.float64)
    for sign in (1.0, -1.0):
        found = vespo_policy_loss(policy - 1, old - 1, torch.full_like(old, sign), torch.ones(3, 1))
        assert found.abs().tolist()[1] == [1.0]
        assert found.abs()[[0, 2]].max() < 1e-20


def test_kl_cov_penalises_marked_tokens_alone():
    policy, old, advantages, mask = random_batch()
    found = kl_cov_loss(policy, old, advantages, mask, 0.7)
    for mine, p, q, a, is_marked in places(found, policy, old, advantages, mask):
        expected = -math.exp(p - q) * a + 0.7 * abs(p - q) * is_marked
        assert mine == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_covariances_equal_a_slow_loop():
    policy, _, advantages, mask = random_batch()
    found = covariances(policy.detach(), advantages, mask)
    mean_p, mean_a = (statistics.fmean(tensor[mask].tolist()) for tensor in (policy, advantages))
    for mine, p, a, is_inside in places(found, policy, advantages, mask):
        assert abs(mine - (p - mean_p) * (a - mean_a) * is_inside) < 1e-12
    # The mean over tokens is the covariance of log-probabilities and advantages.
    inside = torch.stack([policy.detach()[mask], advantages[mask]])
    torch.testing.assert_close(found[mask].mean(), torch.cov(inside, correction=0)[0, 1])


def test_the_highest_share():
    values = torch.arange(12.0).view(3, 4)
    mask = values != 11
    assert values[highest(values, mask, 0.2)].tolist() == [9.0, 10.0]
    assert values[highest(values, mask, 1e-6)].tolist() == [10.0], "one at least"
    assert torch.equal(highest(values, mask, 1.0), mask)
    assert not highest(values, torch.zeros_like(mask), 0.5).any()


def test_tokens_are_drawn_between_bounds_by_the_seed():
    values = torch.arange(100.0).view(10, 10)
    mask = values % 3 > 0
    draws = [drawn_between(values, mask, 0.1, 20.0, 60.0, seed) for seed in range(50)]
    assert all(int(draw.sum()) == 6 for draw in draws)
    assert torch.equal(draws[3], drawn_between(values, mask, 0.1, 20.0, 60.0, 3))
    between = mask & (values > 20) & (values < 60)
    assert torch.equal(torch.stack(draws).any(dim=0), between), "each one between the bounds, and no other"
    assert torch.equal(drawn_between(values, mask, 1.0, 20.0, 60.0, 0), between)
    assert not drawn_between(values, mask, 0.1, 200.0, 300.0, 0).any()


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
    # R = 1 - 0.5 * 0.5 and 0 - 0.5 * -1; the loss is (0.75 - 0.5)^2 / (2 * 0.5).
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


def pairs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(4)]


def test_online_dpo_by_hand():
    numbers = [torch.tensor([x]) for x in (-1.0, -2.0, -1.5, -1.5)]
    # h = 0.5 + 0.5 = 1
    assert online_dpo_loss(*numbers, beta=2.0).item() == pytest.approx(math.log(1 + math.exp(-2)))
    smooth = 0.9 * math.log(1 + math.exp(-2)) + 0.1 * math.log(1 + math.exp(2))
    assert online_dpo_loss(*numbers, beta=2.0, label_smoothing=0.1).item() == pytest.approx(smooth)
    assert online_dpo_loss(*numbers, beta=2.0, kind="ipo").item() == pytest.approx(0.75**2)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_online_dpo_equals_a_slow_loop(kind):
    chosen, rejected, reference_chosen, reference_rejected = pairs()
    found = online_dpo_loss(chosen, rejected, reference_chosen, reference_rejected, 0.3, kind=kind)
    for i in range(6):
        h = (chosen[i] - reference_chosen[i] - rejected[i] + reference_rejected[i]).item()
        expected = math.log(1 + math.exp(-0.3 * h)) if kind == "sigmoid" else (h - 1 / 0.6) ** 2
        assert found[i].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_gradient_of_online_dpo(kind):
    chosen, rejected, *references = (x.detach() for x in pairs())
    inputs = (chosen.requires_grad_(), rejected.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: online_dpo_loss(a, b, *references, 0.3, kind=kind), inputs)


def test_the_reference_of_online_dpo_gets_no_gradient():
    numbers = pairs()
    online_dpo_loss(*numbers, 0.3).sum().backward()
    assert numbers[2].grad is None
    assert numbers[3].grad is None


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"beta": 0.0}, "beta"),
        ({"beta": 1.0, "label_smoothing": 0.5}, "label_smoothing"),
        ({"beta": 1.0, "label_smoothing": 0.1, "kind": "ipo"}, "label_smoothing"),
        ({"beta": 1.0, "kind": "hinge"}, "kind"),
    ],
)
def test_refusals_of_online_dpo(more, name):
    with pytest.raises(ValueError, match=name):
        online_dpo_loss(*pairs(), **more)


@pytest.mark.parametrize("center_coef", [0.0, 0.3])
def test_the_loss_of_a_reward_model_equals_a_slow_loop(center_coef):
    chosen, rejected, margins, _ = (x.detach() for x in pairs())
    found = bradley_terry_loss(chosen, rejected, margins, center_coef)
    for i in range(6):
        c, r = chosen[i].item(), rejected[i].item()
        expected = math.log(1 + math.exp(-(c - r - margins[i].item()))) + center_coef * (c + r) ** 2
        assert found[i].item() == pytest.approx(expected, rel=1e-12)
    # By hand: a tie without margin has probability 1/2, and two scores of 1 add center_coef * (1 + 1)^2.
    tie = bradley_terry_loss(*torch.tensor([[1.0], [1.0], [0.0]]), center_coef)
    assert tie.item() == pytest.approx(math.log(2) + 4 * center_coef)
    inputs = (chosen.requires_grad_(), rejected.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: bradley_terry_loss(a, b, margins, center_coef), inputs)
