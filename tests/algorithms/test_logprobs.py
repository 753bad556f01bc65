"""Log-probabilities and entropies of tokens: against float64 softmax, in any chunks, from hidden states too."""

import math
import os
import subprocess
import sys

import pytest
import torch
from kit.allocated import most_allocated
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vectorlm.algorithms import logprobs
from vectorlm.algorithms.logprobs import align, entropy, token_logprobs, token_values
from vectorlm.algorithms.support import Support, truncate


def logits_and_tokens(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3, 5, 11, generator=generator, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), torch.randint(0, 11, (3, 5), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
def test_equals_softmax_position_by_position(temperature, chunk_tokens):
    logits, tokens = logits_and_tokens()
    found = token_logprobs(logits, tokens, temperature, chunk_tokens)
    spread = entropy(logits, temperature, chunk_tokens)
    for b in range(3):
        assert found[b, 0] == spread[b, 0] == 0
        for t in range(1, 5):
            probabilities = torch.softmax(logits[b, t - 1] / temperature, -1)
            torch.testing.assert_close(found[b, t], probabilities[tokens[b, t]].log())
            torch.testing.assert_close(spread[b, t], -(probabilities * probabilities.log()).sum())


@pytest.mark.parametrize("function", ["logprobs", "entropy"])
def test_gradient_in_chunks(function):
    logits, tokens = logits_and_tokens()
    of = (
        (lambda x: token_logprobs(x, tokens, 0.8, 3))
        if function == "logprobs"
        else (lambda x: entropy(x, 0.8, 3))
    )
    assert torch.autograd.gradcheck(of, (logits,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_that_cannot_be_drawn_change_neither_entropy_nor_its_gradient(dtype):
    """Compare with a vocabulary without these tokens; the factor replaces the weight of a loss."""
    logits, _ = logits_and_tokens(dtype)
    banned = torch.tensor([2, 5, 10])
    allowed = torch.tensor([place for place in range(11) if place not in banned])
    masked = logits.detach().clone()
    masked[..., banned] = -torch.inf
    masked.requires_grad_()
    (1000 * entropy(masked, 0.7)).sum().backward()
    short = logits.detach()[..., allowed].requires_grad_()
    (1000 * entropy(short, 0.7)).sum().backward()
    torch.testing.assert_close(entropy(masked, 0.7), entropy(short, 0.7))
    torch.testing.assert_close(masked.grad[..., allowed], short.grad)
    assert masked.grad[..., banned].eq(0).all()
    assert token_logprobs(masked, torch.full((3, 5), 2))[:, 1:].eq(-torch.inf).all()


def test_hidden_states_and_a_head_give_the_same_as_logits():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(6, 11, bias=False, dtype=torch.float64)
    _, tokens = logits_and_tokens()
    for mine, plain in (
        (token_logprobs(hidden, tokens, 0.9, 4, head=head), token_logprobs(head(hidden), tokens, 0.9)),
        (entropy(hidden, 0.9, 4, head=head), entropy(head(hidden), 0.9)),
    ):
        torch.testing.assert_close(mine, plain)
        grads = [
            torch.autograd.grad(x.sum(), [hidden, head.weight], retain_graph=True) for x in (mine, plain)
        ]
        torch.testing.assert_close(*grads)


def test_half_precision_logits_are_summed_in_float32():
    logits, tokens = logits_and_tokens(torch.bfloat16)
    found = token_logprobs(logits, tokens)
    assert found.dtype == torch.float32
    expected = token_logprobs(logits.detach().double(), tokens)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_one_token_was_predicted_by_nothing():
    assert token_logprobs(torch.randn(2, 1, 4), torch.zeros(2, 1, dtype=torch.long)).tolist() == [
        [0.0],
        [0.0],
    ]


def test_no_rows_have_no_logprobs():
    logits, tokens = logits_and_tokens()
    assert token_logprobs(logits[:0], tokens[:0]).shape == (0, 5)
    assert entropy(logits[:0]).shape == (0, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "expected"), [("none", 12), ("value", 12), ("collision", 12), ("gradient", 21)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_takes_as_many_bytes_for_each_logit_as_the_memory_plan_says(kind, expected, dtype):
    states = torch.randn(256, 8, dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(8, 4096, bias=False, dtype=dtype)

    def learn():
        targets = torch.zeros(256, dtype=torch.long)
        found = token_values(states, targets, 0.7, head=head, entropy=kind)
        (found.logprobs + found.entropies).sum().backward()

    assert most_allocated(learn) / (256 * 4096) == pytest.approx(expected, rel=0.02)


class Traffic(TorchDispatchMode):
    """A mode that counts the bytes of inputs and outputs whose last dimension is the vocabulary."""

    IGNORED = ("gather", "index", "scatter_")

    def __init__(self, size):
        super().__init__()
        self.size, self.num_bytes = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if not func.is_view and not any(word in str(func) for word in self.IGNORED):
            tensors = [x for x in tree_leaves((args, kwargs, found)) if isinstance(x, torch.Tensor)]
            self.num_bytes += sum(x.nbytes for x in tensors if x.ndim and x.shape[-1] == self.size)
        return found


def test_the_head_moves_at_most_44_bytes_for_each_logit():
    size = 4099
    states = torch.randn(64, 8, requires_grad=True)
    head = torch.nn.Linear(8, size, bias=False)
    targets = torch.randint(0, size, (64,))
    with Traffic(size) as traffic:
        found = token_values(states, targets, head=head, entropy="value")
        found.logprobs.sum().backward()
    assert found.entropies.all()
    assert traffic.num_bytes / (64 * size) <= 44


def test_devices_whose_memory_the_host_cannot_read_compute_entropies():
    states = torch.randn(4, 96, device="meta", requires_grad=True)
    targets = torch.zeros(4, dtype=torch.int64, device="meta")
    assert token_values(states, targets, entropy="value").entropies.shape == (4,)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_of_large_scores_are_those_of_float64(temperature, dtype):
    generator = torch.Generator().manual_seed(0)
    scores = (12 * torch.randn(40, 5003, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, 5003, (40,), generator=generator)
    weights = torch.randn(40, generator=generator)
    found = token_values(scores, targets, temperature, 16, entropy="value")
    (found.logprobs * weights).sum().backward()
    exact = scores.detach().double().requires_grad_()
    logprobs = torch.log_softmax(exact / temperature, dim=-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    (chosen * weights).sum().backward()
    torch.testing.assert_close(found.logprobs.double(), chosen, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        found.entropies.double(), torch.special.entr(logprobs.exp()).sum(-1), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(scores.grad, exact.grad.to(dtype), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.skipif("VECTORLM_TRITON" not in os.environ, reason="VECTORLM_TRITON names no folder with Triton")
def test_the_kernel_finds_the_same_in_tritons_interpreter():
    code = "import torch, vectorlm.algorithms.softmax_kernel as k; print('found', k.differs(torch.device('cpu')), '.')"
    paths = [*sys.path, os.environ["VECTORLM_TRITON"]]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "found  ." in done.stdout, done.stderr[-2000:]


def test_a_greedy_temperature_is_refused():
    logits, tokens = logits_and_tokens()
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(logits, tokens, 0.0)


def test_align_gives_each_token_what_was_said_before_it():
    assert align(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[0.0, 1.0, 2.0]]


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
    """Return log-probability, entropy and whether the token was outside the support, for a row without ties."""
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
        # Truncation keeps one of two equal tokens: the drawn one.
        (Support(top_p=0.8), 0, None, False),
        (Support(top_p=0.8), 2, [0, 1, 2], False),
        (Support(top_p=0.8), 3, [0, 1, 3], False),
        (Support(top_p=0.4), 3, [0, 3], True),
        (Support(top_k=3), 0, [0, 1, 2, 3], False),
        (Support(min_p=0.5), 1, [0, 1], False),
        # The first token has two thirds of the mass that top_k keeps, and half of all mass.
        (Support(top_p=0.6, top_k=2), 0, [0], False),
        # The first token has four sevenths of the mass that min_p keeps.
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
    # Truncation does not change the scores that it keeps.
    assert torch.equal(scores[0, found], probabilities.log()[0, found])


@pytest.mark.slow
@pytest.mark.parametrize("support", SUPPORTS)
def test_gradient_in_chunks_and_none_for_what_is_cut(support):
    scores, tokens = scores_and_tokens(num_rows=8)

    def values(scores):
        found = token_values(scores, tokens, 0.8, 3, entropy="gradient", support=support)
        return found.logprobs, found.entropies

    assert torch.autograd.gradcheck(values, (scores,))
    gradient = torch.autograd.grad(sum(tensor.sum() for tensor in values(scores)), scores)[0]
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
    for a, b in zip(found[:3], plain[:3], strict=True):
        torch.testing.assert_close(a, b)


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
    """In bf16 many scores are equal. Keeping all tokens tied with the last one would keep far more mass than top_p."""
    generator = torch.Generator().manual_seed(0)
    scores = (8 + torch.rand(50, 1000, generator=generator)).bfloat16().float()
    probabilities, tokens = scores.softmax(-1), scores.argmin(-1)
    for token in (tokens, scores.argmax(-1)):
        kept = truncate(scores, token, Support(top_p=0.5))[0] > -torch.inf
        mass = torch.where(kept, probabilities, 0.0).sum(-1)
        assert ((mass >= 0.5 - 1e-5) & (mass < 0.5 + 0.005)).all()


def test_probabilities_that_do_not_quite_add_up_bring_nothing_back():
    scores, tokens = scores_and_tokens(torch.float32)
    # Equal scores keep a whole row, which makes the code look at all positions of the other rows too.
    scores = torch.cat([scores.detach(), torch.zeros(1, SIZE)])
    tokens = torch.cat([scores[:-1].argmax(-1), tokens[:1]])
    kept = truncate(scores, tokens, Support(top_p=1 - 1e-9, top_k=4))[0] > -torch.inf
    assert kept.sum(-1).tolist() == [4] * len(scores[:-1]) + [SIZE]
