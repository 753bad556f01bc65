"""`fp32_head`: engine and trainer compute float32 logits from hidden states in bfloat16."""

import copy

import pytest
import torch
from kit.rank_processes import save_tiny_llama
from transformers import AutoModelForCausalLM

from vectorlm import SamplingEngine
from vectorlm.algorithms.logprobs import compute_head_in_float32
from vectorlm.sampling.backends.transformers import Transformers
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.packing import Rows

VLLM = {"dtype": "bfloat16", "max_model_len": 64, "kv_cache_memory_bytes": 16 << 20}
SAMPLED = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "seed": 3, "logprobs": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a model with all logits near -150, where bfloat16 has only integers; softmax ignores the common part."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("fp32") / "model", hidden_size=64)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        head = model.get_output_embeddings().weight
        assert head is not model.get_input_embeddings().weight
        head[:, 0] = -20.0
    model.save_pretrained(folder)
    return folder


def row_of(completion):
    tokens = [*completion.prompt_token_ids, *completion.token_ids]
    is_asked = torch.arange(len(tokens))[None] >= len(completion.prompt_token_ids)
    return Rows(torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.int64), is_asked, (0,))


def gap(folder, fp32_head):
    """Return the mean difference between vLLM's and the trainer's log-probabilities, both in bfloat16."""
    model = load_model(folder, dtype="bfloat16", fp32_head=fp32_head).eval()
    with SamplingEngine(folder, **VLLM, fp32_head=fp32_head) as engine:
        engine.update(model, 0)
        ((completion,),) = engine.sample([[2, 3, 4, 5]], SAMPLED)
    expected = LanguageModel(model).logprobs(row_of(completion))[0, -len(completion.token_ids) :]
    return (torch.tensor(completion.sampler_logprobs) - expected.detach()).abs().mean()


def test_vllm_and_trainer_agree_where_rounded_logits_do_not(folder):
    exact, rounded = gap(folder, True), gap(folder, False)
    assert exact < 0.1 * rounded


@pytest.mark.slow
@pytest.mark.parametrize("receiver", ["live", "packed"])
def test_vllm_rounds_logits_to_bfloat16_only_without_it(folder, receiver):
    arguments = {**VLLM, "receiver": receiver, "logprobs_mode": "raw_logits"}
    for fp32_head in (False, True):
        with SamplingEngine(folder, **arguments, fp32_head=fp32_head) as engine:
            engine.update(load_model(folder, dtype="bfloat16"), 0)
            ((answer,),) = engine.sample([[2, 3, 4, 5]], SAMPLED)
        logits = torch.tensor(answer.sampler_logprobs)
        assert torch.equal(logits.bfloat16().float(), logits) != fp32_head


@pytest.mark.parametrize("fp32_head", [False, True])
def test_transformers_returns_float32_logits_only_with_it(folder, fp32_head):
    backend = Transformers(str(folder), receiver="live", dtype="bfloat16", fp32_head=fp32_head)
    logits = backend.model(torch.tensor([[2, 3]], device=backend.model.device)).logits
    assert logits.dtype == (torch.float32 if fp32_head else torch.bfloat16)


@pytest.mark.parametrize("packs", [True, False])
def test_the_trainer_multiplies_in_float32_and_gradients_reach_the_weights(folder, packs):
    model = load_model(folder, dtype="bfloat16", fp32_head=True)
    trainer = LanguageModel(model, packs=packs)
    assert trainer.packs == packs
    tokens = torch.arange(2, 14)[None]
    rows = Rows(tokens, torch.ones_like(tokens), torch.arange(12)[None] > 3, (0,))
    found = trainer.logprobs(rows)
    found.sum().backward()
    states = model.base_model(input_ids=tokens).last_hidden_state
    logits = states.double() @ model.get_output_embeddings().weight.double().T
    expected = logits.log_softmax(-1)[0, 3:-1].gather(1, tokens[0, 4:, None])[:, 0]
    torch.testing.assert_close(found[0, 4:].double(), expected, rtol=0, atol=1e-4)
    scores = trainer.scores(rows).logprobs(slice(None))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.gather(1, tokens[0, 4:, None])[:, 0], found[0, 4:], rtol=0, atol=1e-4)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_copy_of_the_model_uses_its_own_weights(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    compute_head_in_float32(model.get_output_embeddings())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_output_embeddings().weight.zero_()
    assert not model(torch.tensor([[1, 2]])).logits.eq(0).any()
    assert other(torch.tensor([[1, 2]])).logits.eq(0).all()
