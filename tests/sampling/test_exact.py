"""Exact mode in a user's own loop: engine and trainer have the same bits, and unsupported cases are refused by name."""

import json

import pytest
import torch
import transformers
from kit.families import FAMILIES, Family, save_family
from kit.rank_processes import save_adapters, save_tiny_llama
from kit.tiny_engine import TINY_ENGINE
from torch.nn import functional
from transformers import AutoModelForCausalLM

import vectorlm
from vectorlm import SamplingEngine
from vectorlm.errors import ConfigError, EngineError
from vectorlm.sampling import exact
from vectorlm.sampling.settings import EXACT_FAMILIES, EXACT_ROPES, why_not_exact

EXPERTS = {"num_experts_per_tok": 2, "num_experts": 6, "moe_intermediate_size": 40}
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32, "factor": 2.0}
WIDE = {"initializer_range": 0.08}
MODELS = {
    "an odd width": Family("LlamaConfig", "", {"intermediate_size": 340, **WIDE}),
    "odd widths": Family("Qwen2Config", "", {"intermediate_size": 200, "vocab_size": 101, **WIDE}),
    "llama3 rope": Family(
        "LlamaConfig",
        "",
        {"rope_parameters": {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    "linear rope": Family("LlamaConfig", "", {"rope_parameters": {**ROPE, "rope_type": "linear"}}),
    "yarn": Family("LlamaConfig", "", {"rope_parameters": {**ROPE, "rope_type": "yarn"}}),
    **{name: FAMILIES[name] for name in ("Mistral", "Qwen3", "Gemma 2", "Gemma 3", "Phi-3", "Granite")},
    "OLMo 2": Family("Olmo2Config", "", WIDE),
    "OLMo 3": Family(
        "Olmo3Config", "", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "SmolLM3": Family("SmolLM3Config", "", {"no_rope_layer_interval": 2}),
    "Mixtral": Family("MixtralConfig", "", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "OLMoE": Family("OlmoeConfig", "", {"num_experts_per_tok": 8, "num_experts": 20}),
    "Qwen3-MoE": Family("Qwen3MoeConfig", "", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
}
EXACT_ENGINE = {**TINY_ENGINE, "receiver": "live", "exact": True}
LENGTHS = (3, 9, 17, 31)


def slow_unless(*fast):
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in MODELS]


def prompts_of(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 48, (length,), generator=generator).tolist() for length in lengths]


def load(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()


def share_equal(model, completions, temperature=1.0):
    """Return the share of the trainer's log-probabilities that equal the engine's bit for bit."""
    found = []
    for completion in (one for group in completions for one in group):
        ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
        start = len(completion.prompt_token_ids)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]
        found.append(logprobs == torch.tensor(completion.sampler_logprobs))
    return torch.cat(found).float().mean().item()


def sampled(engine, lengths=LENGTHS, **params):
    """Sample prompts together, then one alone: its products have a single row."""
    params = {"max_tokens": 12, "logprobs": 0, "ignore_eos": True, "n": 2, "seed": 1, **params}
    return engine.sample(prompts_of(lengths), params) + engine.sample(
        prompts_of(lengths)[:1], params | {"n": 1}
    )


@pytest.mark.parametrize("name", slow_unless("Qwen3", "Mixtral"))
def test_all_bits_are_equal(name, tmp_path):
    path = save_family(MODELS[name], tmp_path / "model", tied=MODELS[name].always_tied)
    with SamplingEngine(path, **EXACT_ENGINE) as engine:
        completions = sampled(engine)
        others = sampled(engine, temperature=0.7)
    # The test would prove nothing if a plain model had the engine's bits.
    assert share_equal(load(path), completions) < 1.0
    model = vectorlm.exact(load(path))
    assert share_equal(model, completions) == share_equal(model, others, 0.7) == 1.0


@pytest.mark.parametrize("num_threads", [1, 2])
def test_chunks_of_prompts_threads_and_updates_change_no_bit(num_threads, tmp_path):
    path = save_family(MODELS["odd widths"], tmp_path / "model")
    model = vectorlm.exact(load(path))
    before = torch.get_num_threads()
    with SamplingEngine(path, **EXACT_ENGINE, max_num_batched_tokens=64, max_num_seqs=16) as engine:
        try:
            torch.set_num_threads(num_threads)
            for step in range(2):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.01)
                engine.update(model, step)
                for _ in range(2):  # In the second iteration, prompts are cached.
                    assert share_equal(model, sampled(engine, (40, 40, 33, 5))) == 1.0
        finally:
            torch.set_num_threads(before)


def test_merged_adapters_and_padded_batches_are_exact(tmp_path):
    from peft import PeftModel

    path = save_family(MODELS["an odd width"], tmp_path / "model")
    adapters = save_adapters(path, tmp_path / "adapters", target_modules=["q_proj", "up_proj", "down_proj"])
    model = vectorlm.exact(PeftModel.from_pretrained(load(path), adapters, is_trainable=True))
    with SamplingEngine(path, **EXACT_ENGINE) as engine:
        engine.update(model, 0)
        completions = sampled(engine)
    assert share_equal(model, completions) == 1.0
    rows = [[*one.prompt_token_ids, *one.token_ids] for group in completions for one in group]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    logprobs = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
    for row, found in enumerate(logprobs):
        tokens = torch.tensor(rows[row][-12:])[:, None]
        own = found[len(rows[row]) - 13 : len(rows[row]) - 1].gather(1, tokens)[:, 0]
        expected = [one for group in completions for one in group][row].sampler_logprobs
        assert torch.equal(own.detach(), torch.tensor(expected))
    logprobs.sum().backward()
    assert all(parameter.grad.any() for name, parameter in model.named_parameters() if "lora_B" in name)
    with pytest.raises(ConfigError, match="exact needs rows that are padded on the right"):
        model(input_ids=ids.flip(1), attention_mask=mask.flip(1), use_cache=False)


def test_every_family_of_the_list_has_a_model_here():
    kinds = {getattr(transformers, model.config).model_type for model in MODELS.values()}
    assert kinds == set(EXACT_FAMILIES)
    ropes = [model.settings.get("rope_parameters", {}) for model in MODELS.values()]
    assert {rope.get("rope_type", "default") for rope in ropes} == EXACT_ROPES


@pytest.mark.parametrize("size", [(64, 96), (64, 49), (340, 20), (40, 8), (1536, 20)])
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_rows_of_a_product_do_not_depend_on_the_batch(size, num_threads):
    torch.manual_seed(0)
    width, columns = size
    x, weight, bias = torch.randn(70, width), torch.randn(columns, width), torch.randn(columns)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = exact.linear(x, weight, bias)
        torch.set_num_threads(num_threads)
        for count in (*range(1, 20), 33, 70):
            assert torch.equal(exact.linear(x[:count], weight, bias), whole[:count])
        # The engine multiplies several weights in one product.
        both = exact.linear(x, torch.cat([weight, weight[:24]]))
        assert torch.equal(both[:, :columns], exact.linear(x, weight))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(whole, functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("own", "plain"),
    [(exact.silu, functional.silu), (exact.gelu_tanh, lambda x: functional.gelu(x, approximate="tanh"))],
)
def test_activations_round_every_element_alike(own, plain):
    x = torch.cat([torch.randn(1001) * 5, torch.tensor([-100.0, 100.0, 0.0])])
    found = own(x)
    assert torch.equal(found, torch.cat([own(one) for one in x.split(1)]))
    torch.testing.assert_close(found, plain(x.double()).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["an odd width", "Gemma 3", "Qwen3-MoE"])
def test_the_gradient_is_as_near_to_float64_as_before(name, tmp_path):
    path = save_family(MODELS[name], tmp_path / "model")
    ids = torch.tensor([prompt[:9] for prompt in prompts_of((9, 9, 9))])

    def gradient(model):
        # transformers' grouped products of experts do not support float64.
        if "MoE" in name:
            model.set_experts_implementation("eager")
        logprobs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[:, :-1]
        logprobs.gather(2, ids[:, 1:, None]).sum().backward()
        return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])

    reference = gradient(load(path, torch.float64))
    plain, own = gradient(load(path)), gradient(vectorlm.exact(load(path)))
    assert not torch.equal(plain, own)
    before, after = ((found - reference).norm() / reference.norm() for found in (plain, own))
    assert after <= before + 1e-6


@pytest.mark.parametrize(
    "argument",
    [
        {"dtype": "bfloat16"},
        {"receiver": "packed"},
        {"inference": "transformers"},
        {"enable_lora": True},
        {"tensor_parallel_size": 2},
        {"speculative_config": {"method": "ngram"}},
        {"enforce_eager": False},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_arguments_that_may_change_bits_are_refused(folder, argument):
    with pytest.raises(ValueError, match=f"{next(iter(argument))}=.* exact"):
        SamplingEngine(folder, **{**EXACT_ENGINE, **argument})


def test_models_that_are_not_exact_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="exact needs a model of one of the families"):
        vectorlm.exact(
            AutoModelForCausalLM.from_config(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2))
        )
    with pytest.raises(ConfigError, match="exact needs a model of transformers"):
        vectorlm.exact(torch.nn.Linear(2, 2))
    path = save_tiny_llama(tmp_path / "model", dropout=0.1)
    with pytest.raises(ConfigError, match="exact needs a model in float32"):
        vectorlm.exact(load(path, torch.bfloat16))
    with pytest.raises(ConfigError, match=r"attention_dropout=0.1 must be 0 with exact"):
        vectorlm.exact(load(path)).train()(input_ids=torch.tensor([[1, 2, 3]]))
    description = json.loads((path / "config.json").read_text())
    assert why_not_exact(description) is None
    assert "'longrope'" in why_not_exact(description | {"rope_scaling": {"type": "longrope", "factor": 2.0}})


@pytest.mark.slow
def test_the_engine_refuses_other_families(tmp_path):
    path = save_family(FAMILIES["OPT"], tmp_path / "model")
    with (
        SamplingEngine(path, **EXACT_ENGINE) as engine,
        pytest.raises(EngineError, match="exact needs a model of"),
    ):
        engine.wait_until_ready()
