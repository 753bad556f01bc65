"""vLLM's log-probabilities of truncated sampling are the trainer's, which finds the support by itself."""

import pytest
import torch
from swap_cases import PROMPTS
from transformers import AutoModelForCausalLM

from vectorlm.algorithms import Support
from vectorlm.algorithms.logprobs import token_values

TINY_LLAMA = {"hidden_size": 64}
FP32_GAP = 1e-4


@pytest.fixture(scope="module")
def trained(engine, folder):
    """The engine's model, with logits as far apart as those of a trained one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(25)
    engine.update(model, 0)
    return model


def values_of(completions, model, temperature, support):
    """Return the engine's log-probabilities of all tokens, and the trainer's values."""
    scores, tokens, theirs = [], [], []
    for each in completions:
        ids = torch.tensor([*each.prompt_token_ids, *each.token_ids])
        start = len(each.prompt_token_ids)
        scores.append(model(ids[None]).logits[0, start - 1 : -1])
        tokens.append(ids[start:])
        theirs.append(torch.tensor(each.sampler_logprobs))
    ours = token_values(torch.cat(scores), torch.cat(tokens), temperature, support=support)
    return torch.cat(theirs), ours


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
    completions = [each for group in answers for each in group]
    theirs, ours = values_of(completions, trained, temperature, Support(**cuts))
    assert (ours.logprobs - theirs).abs().max() < FP32_GAP
    assert ours.outside.eq(0).all()
    whole = values_of(completions, trained, temperature, Support())[1].logprobs
    if cuts:
        assert (theirs - whole).max() > 0.05, "little was cut, so equality proves little"
