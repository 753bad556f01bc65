"""The versions of tokens: each must be the weights that sampled the token, which its log-probability shows."""

import itertools
import time

import pytest
import torch
from swap_cases import reference_logprobs
from transformers import AutoModelForCausalLM

from vectorlm import HFEngine

TINY_LLAMA = {"hidden_size": 64, "max_length": 256}
# With few slots for a group and little memory for two long completions, vLLM preempts some.
ENGINE_ARGS = {"max_model_len": 256, "max_num_seqs": 3, "kv_cache_memory_bytes": 384 << 10}
WAYS = ("keep", "recompute")
NUM_MODELS = 5
PROMPTS = [[2, 3, 4], [5, 6, 7, 8, 9, 10, 11], [12]]


def models_apart(folder, with_layers):
    """Return models with clearly different log-probabilities of a token.

    Without `with_layers` they share all layers below the head, and a KV cache of any model is right for all.
    """
    models = []
    for seed in range(NUM_MODELS):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            model.lm_head.weight.normal_(std=0.3, generator=generator)
            for parameter in model.model.layers.parameters() if with_layers else ():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        models.append(model)
    return models


def wrong_labels(completion, models, first_step):
    """Count the tokens whose log-probability does not belong to their version; step s has model s modulo 5."""
    found = torch.tensor(completion.sampler_logprobs, dtype=torch.float64)
    by_model = torch.stack([reference_logprobs(model, completion) for model in models])
    said = torch.tensor([(version - first_step) % NUM_MODELS for version in completion.versions])
    near = (by_model - found).abs() < 1e-4
    assert (near.sum(0) == 1).double().mean() > 0.95, "the models lie too near each other: nothing is shown"
    return int((~near[said, torch.arange(len(said))]).sum())


def check_labels(engine, folder, in_flight, *, pause_s=0.05, n=8, max_tokens=200, rounds=4):
    """Update repeatedly while groups of completions of many lengths are sampled, and check every token."""
    models = models_apart(folder, with_layers=in_flight != "keep")
    first_step = engine.version + 1
    step = first_step - 1
    groups, ended_apart = [], 0
    for number in itertools.count():
        if number >= rounds and (ended_apart > 3 or number == 4 * rounds):
            break  # On a busy machine few updates may have come during a group.
        params = {
            "n": n,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": number,
            "ignore_eos": True,
            # One token in fifty ends a completion, which makes siblings end at different times.
            "stop_token_ids": [number + 14],
            "logprobs": 0,
        }
        step += 1
        engine.update(models[(step - first_step) % NUM_MODELS], step)
        handle = engine.submit(PROMPTS, params)
        doomed = engine.submit([[20, 21]], params)
        while not handle.done():
            time.sleep(pause_s)
            step += 1
            engine.update(models[(step - first_step) % NUM_MODELS], step, in_flight=in_flight)
            doomed.cancel()
        groups += handle.result()
        ended_apart += sum(
            len({completion.versions[-1] for completion in group}) > 1 for group in handle.result()
        )
    completions = [completion for group in groups for completion in group]
    assert all(len(completion.versions) == len(completion.token_ids) for completion in completions)
    wrong = sum(wrong_labels(completion, models, first_step) for completion in completions)
    total = sum(len(completion.token_ids) for completion in completions)
    assert wrong == 0, f"{wrong} of {total} tokens carry a version that did not sample them"
    assert sum(len(set(completion.versions)) > 1 for completion in completions) > 3, (
        "no update met a completion"
    )
    assert ended_apart > 3, "no group ended under several versions"


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", WAYS)
def test_vllm_says_which_weights_sampled_a_token(engine, folder, in_flight):
    check_labels(engine, folder, in_flight)


@pytest.mark.parametrize("in_flight", [pytest.param("keep", marks=pytest.mark.slow), "recompute"])
def test_transformers_says_which_weights_sampled_a_token(folder, in_flight):
    with HFEngine(folder, batch_size=3) as engine:
        check_labels(engine, folder, in_flight, pause_s=0.0, n=4, max_tokens=100, rounds=2)
