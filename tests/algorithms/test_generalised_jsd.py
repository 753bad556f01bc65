"""The divergences of distillation: against loops in float64, in any chunks, and as the mean of the sampled form."""

import pytest
import torch

from vectorlm.algorithms.kl import generalised_jsd, kl_estimate
from vectorlm.algorithms.logprobs import token_values

BETAS = (0.0, 0.3, 0.5, 1.0)


def two_policies(count=4):
    generator = torch.Generator().manual_seed(0)
    policy, teacher = 2 * torch.randn(2, count, 7, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), torch.log_softmax(teacher, -1)


def by_loops(logits, teacher_logprobs, beta):
    """Return the divergence of each row, term by term as the paper's equations have them."""
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
    gradients = [torch.autograd.grad((each * weights).sum(), logits)[0] for each in (found, expected)]
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


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_a_token_that_the_policy_cannot_draw_has_no_part_in_its_own_terms(beta):
    logits, teacher = two_policies(2)
    masked = logits.detach().clone()
    masked[:, 3] = -torch.inf
    masked.requires_grad_()
    found = generalised_jsd(torch.log_softmax(masked, -1), teacher, beta)
    (gradient,) = torch.autograd.grad(found.sum(), masked)
    assert found.isfinite().all()
    assert gradient.isfinite().all()
    if beta == 1:
        others = [0, 1, 2, 4, 5, 6]
        torch.testing.assert_close(
            found, generalised_jsd(torch.log_softmax(masked, -1)[:, others], teacher[:, others], 1.0)
        )


def test_sampled_tokens_have_the_gradient_of_the_reverse_divergence_in_the_mean():
    """Every token of the vocabulary once, weighted by how likely the policy draws it."""
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
    """From hidden states and an output layer, whose gradients come from all chunks."""
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
    for each in (hidden, weight):
        (found,) = torch.autograd.grad((compared[:, 0] * factors).sum(), each, retain_graph=True)
        (wanted,) = torch.autograd.grad((expected * factors).sum(), each, retain_graph=True)
        torch.testing.assert_close(found, wanted)
