"""From logits to a token, beside transformers' own processors and hand-worked numbers."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vectorlm.sampling.draw import cut, draw, penalise


def column(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)[:, None]


@pytest.fixture
def logits():
    return torch.randn(4, 50, generator=torch.Generator().manual_seed(0))


def no_cut(count):
    return {"min_p": column(*[0.0] * count), "top_k": column(*[0] * count), "top_p": column(*[1.0] * count)}


def test_each_row_is_cut_by_its_own_settings_as_transformers_cuts(logits):
    settings = {
        "min_p": column(0.0, 0.1, 0.0, 0.0),
        "top_k": column(0, 0, 7, 7),
        "top_p": column(0.6, 1, 1, 0.5),
    }
    found = cut(logits, **settings)
    expected = [
        TopPLogitsWarper(0.6)(None, logits[:1]),
        MinPLogitsWarper(0.1)(None, logits[1:2]),
        TopKLogitsWarper(7)(None, logits[2:3]),
        TopPLogitsWarper(0.5)(None, TopKLogitsWarper(7)(None, logits[3:])),
    ]
    assert torch.equal(found, torch.cat(expected))
    assert all(1 < row.isfinite().sum() < 50 for row in found)


def test_nothing_is_cut_where_nothing_is_asked(logits):
    assert torch.equal(cut(logits, **no_cut(4)), logits)
    all_kept = no_cut(4) | {"top_k": column(-1, 0, 50, 99)}
    assert torch.equal(cut(logits, **all_kept), logits)


def test_the_likeliest_token_is_never_cut(logits):
    sharp = {"min_p": column(*[1.0] * 4), "top_k": column(*[1] * 4), "top_p": column(*[1e-6] * 4)}
    found = cut(logits, **sharp)
    assert found.isfinite().sum(-1).tolist() == [1] * 4
    assert torch.equal(found.argmax(-1), logits.argmax(-1))


def test_repetition_counts_prompt_and_completion_as_transformers_does(logits):
    prompt, written = [3, 3, 9], [9, 20]
    prompt_counts, counts = (torch.zeros(1, 50) for _ in range(2))
    for token in prompt:
        prompt_counts[0, token] += 1
    for token in written:
        counts[0, token] += 1
    none = column(0.0)
    found = penalise(logits[:1], prompt_counts, counts, repetition=column(1.7), presence=none, frequency=none)
    reference = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + written]), logits[:1].clone())
    torch.testing.assert_close(found, reference)


def test_presence_is_taken_once_and_frequency_each_time_from_the_completions_tokens():
    found = penalise(
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.tensor([[5.0, 0.0, 0.0]]),
        torch.tensor([[0.0, 2.0, 1.0]]),
        repetition=column(1.0),
        presence=column(0.5),
        frequency=column(0.25),
    )
    # token 0 is in the prompt alone; 1: 2 - 0.5 - 2 x 0.25; 2: 3 - 0.5 - 0.25
    assert found.tolist() == [[1.0, 1.0, 2.25]]


def test_numbers_spread_evenly_draw_each_token_as_often_as_it_is_likely(logits):
    num_draws = 10_000
    row = logits[0].masked_fill(torch.arange(50) % 3 == 0, -torch.inf)
    uniforms = ((torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws)[:, None]
    tokens = draw(row.expand(num_draws, -1), uniforms)
    shares = torch.bincount(tokens, minlength=50) / num_draws
    # An interval of length p holds p x 10,000 of the numbers, give or take one.
    assert (shares - row.softmax(-1)).abs().max() <= 1.01 / num_draws
    assert shares[::3].sum() == 0


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_range_draw_possible_tokens(uniform):
    logits = torch.tensor([[-torch.inf, 1.0, 1.0, -torch.inf]])
    assert draw(logits, column(uniform, dtype=torch.float64)).item() == (1 if uniform == 0 else 2)
