"""Log-probabilities and entropies of tokens: against float64 softmax, in any chunks, from hidden states too."""

import pytest
import torch
from kit.allocated import most_allocated

from vectorlm.algorithms.logprobs import align, entropy, token_logprobs, token_values


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
    """Against the vocabulary without them; the factor stands for a loss's weight."""
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


def test_a_greedy_temperature_is_refused():
    logits, tokens = logits_and_tokens()
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(logits, tokens, 0.0)


def test_align_gives_each_token_what_was_said_before_it():
    assert align(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[0.0, 1.0, 2.0]]
