"""vLLM's sampling compared with HFEngine's, and log-probabilities of truncated distributions with the trainer's."""

import pytest
import torch
from kit.tiny_engine import TINY_ENGINE
from swap_cases import FP32_GAP, PROMPTS, scores_of
from transformers import AutoModelForCausalLM

from vectorlm import HFEngine, SamplingEngine
from vectorlm.algorithms.logprobs import token_values
from vectorlm.algorithms.support import Support

TINY_LLAMA = {"hidden_size": 64}
WRITTEN = ["abcabc", [5, 6, 7, 8, 9, 5, 6], [10]]
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 0}


@pytest.mark.slow
def test_what_is_deterministic_is_the_same_of_the_transformers_engine(engine, folder):
    """Greedy decoding covers penalty, limits, end tokens and texts, before any update."""
    with HFEngine(folder) as transformers_engine:
        free = transformers_engine.sample(WRITTEN, GREEDY)
        stops = [free[0][0].text[6:10], free[1][0].text[8:11]]
        cases = [
            GREEDY,
            {**GREEDY, "ignore_eos": False, "max_tokens": 60},
            {**GREEDY, "repetition_penalty": 1.4, "top_k": 3, "top_p": 0.5, "min_p": 0.2},
            {**GREEDY, "stop": stops},
            {**GREEDY, "stop": stops, "include_stop_str_in_output": True, "min_tokens": 9},
            {**GREEDY, "stop_token_ids": [free[0][0].token_ids[3], free[1][0].token_ids[5]]},
            {
                **GREEDY,
                "stop_token_ids": [free[0][0].token_ids[3]],
                "min_tokens": 7,
                "include_stop_str_in_output": True,
            },
            {**GREEDY, "skip_special_tokens": False, "max_tokens": None},
        ]
        for case in cases:
            ours, theirs = transformers_engine.sample(WRITTEN, case), engine.sample(WRITTEN, case)
            for (mine,), (reference,) in zip(ours, theirs, strict=True):
                assert mine.token_ids == reference.token_ids, case
                assert mine.text == reference.text, case
                assert mine.finish_reason == reference.finish_reason, case
                assert mine.prompt_token_ids == reference.prompt_token_ids
                assert mine.sampler_logprobs == pytest.approx(reference.sampler_logprobs, abs=FP32_GAP), case


@pytest.fixture(scope="module")
def trained(engine, folder):
    """Return the engine's model, with logits as far apart as a trained model's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(25)
    engine.update(model, 0)
    return model


def values_of(completions, model, temperature, support):
    """Return the engine's log-probabilities of all tokens, and the trainer's values."""
    scores, tokens, theirs = scores_of(completions, model)
    return theirs, token_values(scores, tokens, temperature, support=support)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"top_p": 0.9},
        {"top_k": 8},
        {"min_p": 0.05},
        {"top_p": 0.8, "top_k": 8},
        {"top_p": 0.8, "top_k": 12, "min_p": 0.02},
    ],
)
@torch.no_grad()
def test_the_engine_reports_what_the_trainer_computes(engine, trained, temperature, cuts):
    params = {"temperature": temperature, "max_tokens": 40, "ignore_eos": True, "logprobs": 0, "seed": 3}
    answers = engine.sample(PROMPTS, {**params, **cuts, "n": 8})
    completions = [completion for group in answers for completion in group]
    theirs, ours = values_of(completions, trained, temperature, Support(**cuts))
    assert (ours.logprobs - theirs).abs().max() < FP32_GAP
    assert ours.outside.eq(0).all()
    whole = values_of(completions, trained, temperature, Support())[1].logprobs
    if cuts:
        assert (theirs - whole).max() > 0.05, "little was cut, so equality proves little"


@pytest.mark.slow
@torch.no_grad()
def test_drafts_of_n_grams_change_no_probability(folder):
    """An engine verifies several draft tokens in one step, and tokens have the same distribution."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    prompts = [[5, 6, 7, 8] * 4, [9, 10, 11] * 5, [3, 4, 5, 6, 7, 8, 3, 4, 5]]
    shapes = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7},
        {"top_k": 8},
        {"top_p": 0.7, "temperature": 1.3},
    ]
    with SamplingEngine(str(folder), speculative_config=drafts, **TINY_ENGINE) as engine:
        for shape in shapes:
            parameters = {"temperature": 1.0, "max_tokens": 24, "seed": 7, "logprobs": 0, **shape}
            answers = engine.sample(prompts, parameters)
            completions = [completion for (completion,) in answers]
            temperature = parameters["temperature"] or 1.0
            theirs, ours = values_of(completions, model, temperature, Support.of(parameters))
            assert (ours.logprobs - theirs).abs().max() < FP32_GAP, shape
            assert engine.sample(prompts, parameters) == answers
