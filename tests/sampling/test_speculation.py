"""Speculative decoding with n-grams: same distribution, and same guarantees of an update in flight."""

import math

import pytest
import torch
from in_flight_cases import another, check_tokens_against_their_caches
from swap_cases import FP32_GAP, largest_gap
from transformers import AutoModelForCausalLM

from vectorlm import SamplingEngine

TINY_LLAMA = {"hidden_size": 64, "max_length": 1024}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ENGINE_ARGS = {"max_model_len": 1024, "kv_cache_memory_bytes": 32 << 20, "speculative_config": DRAFTS}
NUM_SAMPLES = 4000
SHARPNESS = 16.0


def surprise(counts, probabilities):
    """Return Pearson's chi-square in standard deviations above its mean; rare tokens share one cell."""
    expected = probabilities.double() * counts.sum()
    is_rare = expected < 10
    cells = [(counts[~is_rare], expected[~is_rare])]
    cells.append((counts[is_rare].sum()[None], expected[is_rare].sum()[None]))
    total = sum(((found - right) ** 2 / right.clamp(min=1e-9)).sum() for found, right in cells).item()
    freedom = max(int((~is_rare).sum()), 1)
    return (total - freedom) / math.sqrt(2 * freedom)


@pytest.fixture(scope="module")
def sharp(engine, folder):
    """Return the engine's model, whose distributions have a few likely tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPNESS)
    engine.update(model, engine.version + 1)
    return model


@pytest.mark.slow
@torch.no_grad()
def test_accepted_tokens_have_the_distribution_of_the_model(engine, sharp):
    whole = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = sharp.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=60, **whole)[0].tolist()
    engine.accepted_tokens()
    parameters = {"max_tokens": 3, "ignore_eos": True, "logprobs": 0, "n": NUM_SAMPLES // 4}
    answers = engine.sample([prompt] * 4, [{**parameters, "seed": 100_000 * seed} for seed in range(1, 5)])
    completions = [completion for group in answers for completion in group]
    assert engine.accepted_tokens() > 0.1, "few tokens were accepted, so equality proves little"
    assert engine.accepted_tokens() is None
    assert largest_gap(completions[:200], sharp) < FP32_GAP
    vocabulary = sharp.config.vocab_size
    tokens = torch.tensor([completion.token_ids for completion in completions])
    # Enumerate the beginnings of a completion with their probabilities.
    share, contexts = torch.ones(1), torch.zeros(1, 0, dtype=torch.long)
    for place in range(3):
        scores = sharp(torch.cat([torch.tensor(prompt).expand(len(contexts), -1), contexts], 1)).logits[:, -1]
        counts = tokens[:, place].bincount(minlength=vocabulary)
        assert surprise(counts, share @ scores.softmax(-1)) < 4, place
        assert surprise(counts, share @ (scores / 1.2).softmax(-1)) > 8, "another temperature would pass too"
        share = (share[:, None] * scores.softmax(-1)).flatten()
        token = torch.arange(vocabulary).repeat(len(contexts))[:, None]
        contexts = torch.cat([contexts.repeat_interleave(vocabulary, 0), token], 1)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["recompute", pytest.param("keep", marks=pytest.mark.long)])
def test_an_update_in_flight_keeps_its_promise(engine, folder, in_flight):
    check_tokens_against_their_caches(engine, folder, in_flight)


@pytest.mark.long
def test_after_a_swap_log_probabilities_are_of_the_new_weights(engine, folder):
    engine.accepted_tokens()
    for seed in (3, 4):
        model = another(folder, seed)
        engine.update(model, engine.version + 1)
        parameters = {"max_tokens": 40, "ignore_eos": True, "logprobs": 0, "seed": seed, "n": 3}
        answers = engine.sample([[5, 6, 7, 8] * 5, [9, 10, 11] * 6], parameters)
        assert largest_gap([completion for group in answers for completion in group], model) < FP32_GAP
    assert engine.accepted_tokens() > 0


@pytest.mark.parametrize("config", [{"method": "eagle", "model": "x"}, {"model": "draft"}, "mtp"])
def test_other_methods_are_refused_by_value(folder, config):
    with pytest.raises(ValueError, match=r"speculative_config\.method"):
        SamplingEngine(str(folder), speculative_config=config)
