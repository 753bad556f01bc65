"""Ratios, estimates of the KL divergence, the divergences of distillation, and the adaptive weight."""

import math

import pytest
import torch
from random_batch import places, random_batch

from vectorlm.algorithms.kl import AdaptiveKL, exp_clamped, generalised_jsd, kl_estimate
from vectorlm.algorithms.logprobs import token_values

SLOW = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": abs,
}


@pytest.mark.parametrize("kind", SLOW)
@pytest.mark.parametrize("straight_through", [False, True])
def test_equals_a_slow_loop(kind, straight_through):
    policy, reference, _, _ = random_batch()
    found = kl_estimate(policy, reference, kind, straight_through)
    for mine, p, q in places(found, policy, reference):
        assert mine == pytest.approx(SLOW[kind](p - q), rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_its_mean_over_the_policy_is_the_divergence(kind):
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference, kind)).sum(), exact)


def test_straight_through_has_the_gradient_of_the_divergence_and_k1_has_none():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()
    policy = logits.log_softmax(0)
    weights = policy.detach().exp()
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    for kind in SLOW:
        estimate = kl_estimate(policy, reference, kind, straight_through=True)
        (mine,) = torch.autograd.grad((weights * estimate).sum(), logits, retain_graph=True)
        torch.testing.assert_close(mine, exact)
    plain = kl_estimate(policy, reference, "k1")
    (mine,) = torch.autograd.grad((weights * plain).sum(), logits, retain_graph=True)
    torch.testing.assert_close(mine, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", SLOW)
def test_gradient(kind):
    policy, reference, _, _ = random_batch()
    assert torch.autograd.gradcheck(lambda p: kl_estimate(p, reference, kind), (policy,))


def test_k3_is_never_negative_and_keeps_small_differences():
    policy = torch.full((1, 1000), -0.3)
    reference = policy + torch.linspace(-1e-3, 1e-3, 1000)
    found = kl_estimate(policy, reference, "k3")
    assert found.min() >= 0
    # float32 subtraction has an error of 3e-8 in d: at d = 1e-3, d^2 / 2 has a relative error of 1e-4.
    assert found[0, 0].item() == pytest.approx(5e-7, rel=1e-3)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind='k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_the_controller_by_hand():
    controller = AdaptiveKL(initial=0.2, target=6.0, horizon=1000)
    assert controller.update(12.0, 100) == pytest.approx(0.2 * 1.02)  # an error of 1 counts as 0.2
    assert controller.update(5.4, 100) == pytest.approx(0.2 * 1.02 * 0.99)
    before = controller.value
    assert controller.update(0.0, 10_000) == pytest.approx(
        before * 0.8
    )  # by no more than a fifth, and never to 0


def test_the_controller_takes_any_target_and_horizon_above_0():
    # The KL is a tenth above the target, and a batch of two horizons counts as one horizon.
    assert AdaptiveKL(initial=0.5, target=0.05, horizon=0.5).update(0.055, 1) == pytest.approx(0.5 * 1.1)


def test_the_controller_keeps_its_place():
    controller, other = AdaptiveKL(0.2, 6.0, 1000), AdaptiveKL(0.2, 6.0, 1000)
    controller.update(12.0, 100)
    other.load_state_dict(controller.state_dict())
    assert other.value == controller.value


def test_a_resumed_controller_starts_from_a_changed_weight():
    controller, other = AdaptiveKL(0.2, 6.0, 1000), AdaptiveKL(0.5, 6.0, 1000)
    controller.update(12.0, 100)
    other.load_state_dict(controller.state_dict())
    assert other.value == 0.5
    # Another target and another horizon apply to the weight of the checkpoint.
    other = AdaptiveKL(0.2, 3.0, 100)
    other.load_state_dict(controller.state_dict())
    assert other.value == controller.value


@pytest.mark.parametrize("numbers", [(-0.1, 6.0, 10.0), (0.1, 0.0, 10.0), (0.1, 6.0, 0.0)])
def test_the_controller_refuses_numbers_out_of_range(numbers):
    with pytest.raises(ValueError, match="initial"):
        AdaptiveKL(*numbers)


@pytest.mark.parametrize("sign", [1, -1])
def test_large_log_ratios_are_those_of_20(sign):
    far, near = (torch.tensor([sign * d], dtype=torch.float64) for d in (1000.0, 20.0))
    assert torch.equal(exp_clamped(far), near.exp())


@pytest.mark.parametrize("d", [-300.0, -87.9, -60.0, -20.5, 20.5, 300.0])
def test_k3_and_its_gradient_are_right_as_far_as_float32_goes(d):
    policy = torch.tensor([d], requires_grad=True)
    value = kl_estimate(policy, torch.zeros(1), "k3")
    value.backward()
    # e^88 is the largest power that float32 can represent; beyond it, value and gradient stay constant.
    exact = max(d, -88.0)
    assert value.item() == pytest.approx(math.exp(-exact) - 1 + exact, rel=0.05 if d < -88 else 1e-5)
    assert policy.grad.item() == pytest.approx(1 - math.exp(-exact), rel=0.05 if d < -88 else 1e-5)


def test_weighted_by_the_ratio_k3_has_the_gradient_of_the_divergence_whoever_sampled():
    """Enumerate all tokens to compute the expectation under the old policy."""
    generator = torch.Generator().manual_seed(6)
    theta, old, reference = (
        torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), dim=0) for _ in range(3)
    )
    theta.requires_grad_()
    policy = torch.log_softmax(theta, dim=0)
    weighted = (old.exp() * (policy - old).exp() * kl_estimate(policy, reference, "k3")).sum()
    divergence = (policy.exp() * (policy - reference)).sum()
    assert weighted.item() == pytest.approx(divergence.item(), rel=1e-12)
    (found,) = torch.autograd.grad(weighted, theta, retain_graph=True)
    (expected,) = torch.autograd.grad(divergence, theta)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


BETAS = (0.0, 0.3, 0.5, 1.0)


def two_policies(count=4):
    generator = torch.Generator().manual_seed(0)
    policy, teacher = 2 * torch.randn(2, count, 7, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), torch.log_softmax(teacher, -1)


def by_loops(logits, teacher_logprobs, beta):
    """Return the divergence of each row, term by term as in the paper's equations."""
    found = []
    for row, its_logprobs in zip(torch.softmax(logits, -1), teacher_logprobs, strict=True):
        teacher, total = its_logprobs.exp(), 0.0
        for p, q in zip(teacher, row, strict=True):
            mixture = beta * p + (1 - beta) * q
            if beta == 0:
                total = total + p * (p / q).log()
            elif beta == 1:
                total = total + q * (q / p).log()
            else:
                total = total + beta * p * (p / mixture).log() + (1 - beta) * q * (q / mixture).log()
        found.append(total)
    return torch.stack(found)


@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_are_those_of_the_formula(beta):
    logits, teacher = two_policies()
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    found = generalised_jsd(torch.log_softmax(logits, -1), teacher, beta)
    expected = by_loops(logits, teacher, beta)
    torch.testing.assert_close(found, expected)
    gradients = [
        torch.autograd.grad((divergence * weights).sum(), logits)[0] for divergence in (found, expected)
    ]
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0.1


@pytest.mark.parametrize("beta", BETAS)
def test_equal_policies_are_0_apart_and_stay(beta):
    logits, _ = two_policies()
    logprobs = torch.log_softmax(logits, -1)
    found = generalised_jsd(logprobs, logprobs, beta)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-14, rtol=0)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-14, rtol=0)


@pytest.mark.parametrize(
    ("beta", "teacher_draws"), [(0.5, True), (1.0, True), (0.0, False), (0.5, False), (1.0, False)]
)
def test_a_token_that_the_policy_cannot_draw_has_no_part_in_its_own_terms(beta, teacher_draws):
    logits, teacher = two_policies(2)
    if not teacher_draws:
        teacher[:, 3] = -torch.inf
    masked = logits.detach().clone()
    masked[:, 3] = -torch.inf
    masked.requires_grad_()
    found = generalised_jsd(torch.log_softmax(masked, -1), teacher, beta)
    (gradient,) = torch.autograd.grad(found.sum(), masked)
    assert found.isfinite().all()
    assert gradient.isfinite().all()
    if beta == 1 or not teacher_draws:
        others = [0, 1, 2, 4, 5, 6]
        torch.testing.assert_close(
            found, generalised_jsd(torch.log_softmax(masked, -1)[:, others], teacher[:, others], beta)
        )


def test_sampled_tokens_have_the_gradient_of_the_reverse_divergence_in_the_mean():
    """Every token of the vocabulary occurs once, weighted by its probability under the policy."""
    logits, teacher = two_policies(1)
    logprobs = torch.log_softmax(logits, -1)
    advantages = -kl_estimate(logprobs.detach(), teacher, "k1")
    losses = -advantages * logprobs
    (sampled,) = torch.autograd.grad((logprobs.detach().exp() * losses).sum(), logits, retain_graph=True)
    (full,) = torch.autograd.grad(generalised_jsd(logprobs, teacher, 1.0).sum(), logits)
    torch.testing.assert_close(sampled, full)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
def test_chunks_change_nothing(beta, chunk_tokens):
    """Hidden states and the output layer get gradients from all chunks."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(8, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(8, 11, generator=generator, dtype=torch.float64), -1)
    targets = torch.randint(0, 11, (8,), generator=generator)

    def compare(places, logprobs):
        divergence = generalised_jsd(logprobs, teacher[places], beta)
        return torch.stack([divergence, 2 * divergence.detach()], dim=-1)

    how = {"head": lambda states: states @ weight.T, "compare": compare}
    chosen, _, _, compared = token_values(hidden, targets, 0.7, chunk_tokens, **how)
    expected = by_loops(hidden @ weight.T / 0.7, teacher, beta)
    torch.testing.assert_close(compared, torch.stack([expected, 2 * expected], dim=-1))
    logprobs = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    torch.testing.assert_close(chosen, logprobs.gather(1, targets[:, None])[:, 0])
    factors = torch.arange(8.0, dtype=torch.float64)
    for tensor in (hidden, weight):
        (found,) = torch.autograd.grad((compared[:, 0] * factors).sum(), tensor, retain_graph=True)
        (wanted,) = torch.autograd.grad((expected * factors).sum(), tensor, retain_graph=True)
        torch.testing.assert_close(found, wanted)
