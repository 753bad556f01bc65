"""What top_p, top_k and min_p leave to be drawn: against a slow loop in float64, at ties, and where nothing is cut."""

import math

import pytest
import torch

from vectorlm.algorithms import logprobs
from vectorlm.algorithms.logprobs import token_values
from vectorlm.algorithms.support import Support, truncate

SUPPORTS = [
    Support(top_p=0.7),
    Support(top_p=1e-6),
    Support(top_k=1),
    Support(top_k=4),
    Support(min_p=0.1),
    Support(min_p=1.0),
    Support(top_p=0.8, top_k=5),
    Support(top_p=0.6, top_k=6, min_p=0.05),
    Support(top_p=0.999, top_k=10, min_p=0.3),
]
SIZE = 11


def scores_and_tokens(dtype=torch.float64, num_rows=60):
    generator = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(num_rows, SIZE, generator=generator, dtype=torch.float64)
    return scores.to(dtype).requires_grad_(), torch.randint(0, SIZE, (num_rows,), generator=generator)


def slow(scores, token, support):
    """Return log-probability, entropy and whether the token was outside, of one row of numbers without ties."""
    weights = [math.exp(score) for score in scores]
    kept = sorted(range(len(scores)), key=lambda place: -weights[place])
    kept = [place for place in kept if weights[place] >= support.min_p * weights[kept[0]]]
    if support.top_k > 0:
        kept = kept[: support.top_k]
    total, before, nucleus = sum(weights[place] for place in kept), 0.0, []
    for place in kept:
        if before < support.top_p * total or support.top_p == 1:
            nucleus.append(place)
        before += weights[place]
    is_outside = token not in nucleus
    total = sum(weights[place] for place in {*nucleus, token})
    spread = -sum(weights[place] / total * math.log(weights[place] / total) for place in {*nucleus, token})
    return math.log(weights[token] / total), spread, float(is_outside)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [7, 1000])
def test_equals_a_slow_loop(support, temperature, chunk_tokens):
    scores, tokens = scores_and_tokens()
    found = token_values(scores, tokens, temperature, chunk_tokens, entropy="value", support=support)
    rows = zip((scores.detach() / temperature).tolist(), tokens.tolist(), strict=True)
    expected = torch.tensor([slow(row, token, support) for row, token in rows], dtype=torch.float64)
    torch.testing.assert_close(torch.stack(found[:3], dim=1).detach(), expected)
    assert 0 < expected[:, 2].sum() < len(tokens), "the tokens are on both sides"


@pytest.mark.parametrize(
    ("support", "token", "kept", "is_outside"),
    [
        (Support(top_p=0.75), 0, [0, 1], False),
        # Of two equal tokens one stays, and the drawn one is it.
        (Support(top_p=0.8), 0, None, False),
        (Support(top_p=0.8), 2, [0, 1, 2], False),
        (Support(top_p=0.8), 3, [0, 1, 3], False),
        (Support(top_p=0.4), 3, [0, 3], True),
        (Support(top_k=3), 0, [0, 1, 2, 3], False),
        (Support(min_p=0.5), 1, [0, 1], False),
        # Two thirds of what top_k leaves, and half of all.
        (Support(top_p=0.6, top_k=2), 0, [0], False),
        # Four sevenths of what min_p leaves.
        (Support(top_p=0.55, min_p=0.25), 1, [0, 1], True),
    ],
)
def test_bounds_ties_and_order_by_hand(support, token, kept, is_outside):
    probabilities = torch.tensor([[8, 4, 2, 2]], dtype=torch.float64) / 16
    if support == Support(top_p=0.55, min_p=0.25):
        probabilities = torch.tensor([[8, 4, 2, 1, 1]], dtype=torch.float64) / 16
    scores, outside = truncate(probabilities.log(), torch.tensor([token]), support)
    found = torch.nonzero(scores[0] > -torch.inf)[:, 0].tolist()
    assert outside.item() is is_outside
    assert found == kept if kept is not None else len(found) == 3
    # What is kept is as it was.
    assert torch.equal(scores[0, found], probabilities.log()[0, found])


@pytest.mark.parametrize("support", SUPPORTS)
def test_gradient_in_chunks_and_none_for_what_is_cut(support):
    scores, tokens = scores_and_tokens(num_rows=8)

    def values(scores):
        found = token_values(scores, tokens, 0.8, 3, entropy="gradient", support=support)
        return found.logprobs, found.entropies

    assert torch.autograd.gradcheck(values, (scores,))
    gradient = torch.autograd.grad(sum(each.sum() for each in values(scores)), scores)[0]
    cut, _ = truncate(scores.detach() / 0.8, tokens, support)
    assert gradient[cut == -torch.inf].eq(0).all()


@pytest.mark.parametrize("support", [Support(), Support(top_k=-1), Support.of({"top_p": None, "n": 2})])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_where_nothing_can_be_cut_nothing_is_computed(support, temperature, monkeypatch):
    monkeypatch.setattr(logprobs, "truncate", None)
    scores, tokens = scores_and_tokens(torch.float32)
    found = token_values(scores, tokens, temperature, entropy="gradient", support=support)
    plain = torch.log_softmax(scores if temperature == 1.0 else scores / temperature, dim=-1)
    assert torch.equal(found.logprobs, plain.gather(1, tokens[:, None])[:, 0])
    assert found.outside.eq(0).all()


@pytest.mark.parametrize("top_k", [SIZE, SIZE + 1, 10**6])
def test_more_tokens_than_there_are_are_all(top_k):
    scores, tokens = scores_and_tokens(torch.float32)
    found = token_values(scores, tokens, entropy="value", support=Support(top_k=top_k))
    plain = token_values(scores, tokens, entropy="value")
    assert all(torch.equal(a, b) for a, b in zip(found[:3], plain[:3], strict=True))


@pytest.mark.parametrize("support", SUPPORTS)
def test_a_score_that_is_not_a_number_shows(support):
    scores, tokens = scores_and_tokens(torch.float32, num_rows=1)
    broken = scores.detach().clone()
    broken[0, (tokens[0] + 1) % SIZE] = torch.nan
    assert token_values(broken, tokens, support=support).logprobs.isnan().all()


@pytest.mark.parametrize("support", SUPPORTS)
def test_no_tokens_have_no_values(support):
    scores, tokens = scores_and_tokens()
    assert token_values(scores[:0], tokens[:0], support=support).logprobs.shape == (0,)


def test_half_precision_has_ties_and_keeps_the_mass_that_was_asked_for():
    """In bf16 many tokens are equal: keeping all that equal the last one would keep far more than top_p."""
    generator = torch.Generator().manual_seed(0)
    scores = (8 + torch.rand(50, 1000, generator=generator)).bfloat16().float()
    probabilities, tokens = scores.softmax(-1), scores.argmin(-1)
    for token in (tokens, scores.argmax(-1)):
        kept = truncate(scores, token, Support(top_p=0.5))[0] > -torch.inf
        mass = torch.where(kept, probabilities, 0.0).sum(-1)
        assert ((mass >= 0.5 - 1e-5) & (mass < 0.5 + 0.005)).all()


def test_probabilities_that_do_not_quite_add_up_bring_nothing_back():
    scores, tokens = scores_and_tokens(torch.float32)
    # Equal scores keep a whole row, and so all places of the others are looked at.
    scores = torch.cat([scores.detach(), torch.zeros(1, SIZE)])
    tokens = torch.cat([scores[:-1].argmax(-1), tokens[:1]])
    kept = truncate(scores, tokens, Support(top_p=1 - 1e-9, top_k=4))[0] > -torch.inf
    assert kept.sum(-1).tolist() == [4] * len(scores[:-1]) + [SIZE]
