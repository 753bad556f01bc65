"""Preference losses."""

import math

import pytest
import torch

from vectorlm.algorithms.preference import bradley_terry_loss, online_dpo_loss


def pairs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(4)]


def test_by_hand():
    numbers = [torch.tensor([x]) for x in (-1.0, -2.0, -1.5, -1.5)]
    # h = 0.5 + 0.5 = 1
    assert online_dpo_loss(*numbers, beta=2.0).item() == pytest.approx(math.log(1 + math.exp(-2)))
    smooth = 0.9 * math.log(1 + math.exp(-2)) + 0.1 * math.log(1 + math.exp(2))
    assert online_dpo_loss(*numbers, beta=2.0, label_smoothing=0.1).item() == pytest.approx(smooth)
    assert online_dpo_loss(*numbers, beta=2.0, kind="ipo").item() == pytest.approx(0.75**2)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_equals_a_slow_loop(kind):
    chosen, rejected, reference_chosen, reference_rejected = pairs()
    found = online_dpo_loss(chosen, rejected, reference_chosen, reference_rejected, 0.3, kind=kind)
    for i in range(6):
        h = (chosen[i] - reference_chosen[i] - rejected[i] + reference_rejected[i]).item()
        expected = math.log(1 + math.exp(-0.3 * h)) if kind == "sigmoid" else (h - 1 / 0.6) ** 2
        assert found[i].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_gradient(kind):
    chosen, rejected, *references = (x.detach() for x in pairs())
    inputs = (chosen.requires_grad_(), rejected.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: online_dpo_loss(a, b, *references, 0.3, kind=kind), inputs)


def test_the_reference_gets_no_gradient():
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
def test_refusals(more, name):
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
    # By hand: a tie without margin is a coin toss, and its scores of 1 add 0.3 (1 + 1)^2.
    tie = bradley_terry_loss(*torch.tensor([[1.0], [1.0], [0.0]]), center_coef)
    assert tie.item() == pytest.approx(math.log(2) + 4 * center_coef)
    inputs = (chosen.requires_grad_(), rejected.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: bradley_terry_loss(a, b, margins, center_coef), inputs)
