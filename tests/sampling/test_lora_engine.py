"""A single engine with LoRA layers and no launcher: the weights that an adapter swap replaces, proves and keeps."""

from itertools import pairwise

import pytest
import torch
from kit.rank_processes import forked, save_tiny_llama
from lora_cases import OPTIONS, WITH_LORA, adapted, move, swap_and_compare
from peft import LoraConfig
from swap_cases import FP32_GAP, GREEDY, compare, reference_greedy
from transformers import AutoModelForCausalLM

from vectorlm import SamplingEngine
from vectorlm.errors import ConfigError, WeightMismatch
from vectorlm.sampling.messages import BeginUpdate, FinishUpdate
from vectorlm.sampling.weights.inspection import checksum
from vectorlm.sampling.weights.model_tensors import trainer_tensors

NUM_SWAPS = 200
LONG_PROMPT = list(range(2, 46)) * 4


TINY_LLAMA = {"tied": True, "hidden_size": 64, "max_length": 256}
ENGINE_ARGS = {**WITH_LORA, "receiver": "live", "max_model_len": 256, "sampling_params": GREEDY}


@pytest.fixture
def model(folder):
    model = adapted(folder)
    move([model], seed=0)
    return model


@pytest.fixture
def next_step(engine):
    return engine.version + 1


def prove_base(engine, model):
    """Let the engine compare the checksums of its base weights with the trainer's, without writing any."""
    engine._swap._ask_engines("test", BeginUpdate())
    sums = [checksum(tensor) for tensor in trainer_tensors(model).values()]
    engine._swap._ask_engines("test", FinishUpdate(engine.version, sums, ("base",)))
    # The engine counts this as an update without an adapter: the next one must send everything.
    engine._swap.forget()


@pytest.mark.slow
def test_after_many_swaps_the_base_weights_are_bit_identical_and_the_adapter_is_the_last_one(
    engine, model, next_step
):
    whole = engine.update(model, next_step).num_bytes
    for step in range(next_step + 1, next_step + 1 + NUM_SWAPS):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.001 * (step % 7 - 3))
        report = engine.update(model, step)
        assert report.num_bytes < whole / 5, "the base crossed again"
    assert compare(engine, model)[1] < FP32_GAP
    prove_base(engine, model)
    with model.disable_adapter():
        assert compare(engine, model)[1] < FP32_GAP


def test_the_prefix_cache_never_serves_blocks_of_the_adapter_before(engine, model, next_step):
    engine.update(model, next_step)
    cold, warm = (engine.generate([LONG_PROMPT], GREEDY)[0] for _ in range(2))
    assert warm.num_cached_tokens > 0, "the prompt was not cached, so this test would prove nothing"
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    move([model], seed=5)
    engine.update(model, next_step + 1)
    fresh = engine.generate([LONG_PROMPT], GREEDY)[0]
    assert fresh.num_cached_tokens == 0
    assert list(fresh.outputs[0].token_ids) == reference_greedy(model, LONG_PROMPT)


def test_a_base_that_was_written_to_crosses_again(engine, model, next_step):
    whole = engine.update(model, next_step).num_bytes
    with torch.no_grad():
        model.base_model.model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    assert engine.update(model, next_step + 1).num_bytes == whole
    assert compare(engine, model)[1] < FP32_GAP


OTHERS = {
    "embedding and head": {"r": 4, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "one layer": {"r": 1, "target_modules": ["up_proj"], "layers_to_transform": [2]},
    "PiSSA, which changes the base": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "pissa"},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_the_next_model_may_have_other_adapters_and_nothing_of_the_old_ones_stays(
    engine, folder, model, next_step, options
):
    engine.update(model, next_step)
    other = adapted(folder, options)
    move([other], seed=3)
    engine.update(other, next_step + 1)
    assert compare(engine, other)[1] < FP32_GAP


def test_a_model_without_active_adapters_is_sampled_from_as_it_is(engine, folder, model, next_step):
    engine.update(model, next_step)
    with model.disable_adapter():
        engine.update(model, next_step + 1)
        assert compare(engine, model)[1] < FP32_GAP
    engine.update(model, next_step + 2)
    assert compare(engine, model)[1] < FP32_GAP
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        plain.model.norm.weight.mul_(2.0)
    engine.update(plain, next_step + 3)
    assert compare(engine, plain)[1] < FP32_GAP


def test_what_vllms_layers_cannot_compute_is_refused_and_the_engine_goes_on(engine, folder, model, next_step):
    engine.update(model, next_step)
    with pytest.raises(ConfigError, match="use_dora=True"):
        engine.update(adapted(folder, OPTIONS | {"use_dora": True}), next_step + 1)
    large = adapted(folder, {"r": 9, "target_modules": ["q_proj"]})
    with pytest.raises(
        WeightMismatch,
        match="max_lora_rank",
    ):
        engine.update(large, next_step + 1)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ConfigError, match="several active adapters"):
        engine.update(model, next_step + 1)
    model.base_model.set_adapter("default")
    assert engine.version == next_step
    assert compare(engine, model)[1] < FP32_GAP


def test_a_mode_that_the_engine_is_not_built_for_is_refused_at_once(folder):
    for arguments in (
        {"lora_mode": "adaptor"},
        {"lora_mode": "adapter"},
        {"lora_mode": "merged", "enable_lora": True},
    ):
        with pytest.raises(ValueError, match="lora_mode"):
            SamplingEngine(str(folder), **arguments)


CASES = [
    (2, False, "packed", WITH_LORA),
    (2, True, "live", {"exact": True}),
    (2, True, "live", WITH_LORA | {"transport": "pull"}),
    (1, False, "live", WITH_LORA | {"tensor_parallel_size": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "tied", "receiver", "engine_args"),
    CASES,
    ids=["adapter, packed", "merged", "adapter, pulled", "adapter, two workers"],
)
def test_after_each_update_the_engine_is_the_peft_model(tmp_path, world_size, tied, receiver, engine_args):
    folder = save_tiny_llama(tmp_path / "model", tied=tied, hidden_size=64)
    args = {"receiver": receiver, **engine_args}
    for seen in forked(swap_and_compare, str(folder), args, world_size=world_size):
        assert all(gap == 0.0 if "exact" in args else gap < FP32_GAP for gap, _, _ in seen)
        assert all(before[1] != after[1] for before, after in pairwise(seen)), "the updates changed nothing"
        whole, *later = [num_bytes for _, _, num_bytes in seen]
        if "enable_lora" in args:
            assert set(later) == {later[0]}
            assert later[0] < whole / 5, "more than the adapters moved"
        else:
            assert set(later) == {whole}
