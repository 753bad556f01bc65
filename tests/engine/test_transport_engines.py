"""vLLM itself behind the transports that tests elsewhere leave out.

tests/weights/test_transports.py holds the rest, and test_several_ranks.py has two engines that pull.
"""

import pytest
import torch
from lora_cases import WITH_LORA
from lora_cases import swap_and_compare as swap_adapters
from rank_processes import forked
from swap_cases import compare, consecutive_samples_differ, perturb, swap_and_compare
from tiny_engine import TINY_ENGINE
from transformers import AutoModelForCausalLM

from vectorlm import HFEngine, SamplingEngine
from vectorlm.errors import ConfigError

# Two fp32 paths through three layers differ by a few 1e-6; a stale tensor shows as 1e-2 and more.
FP32_GAP = 1e-4

TINY_LLAMA = {"tied": True, "hidden_size": 64, "num_key_value_heads": 2}
CASES = {
    "bucketed": {"receiver": "live", "transport": "bucketed", "bucket_bytes": 1 << 14},
    "pull, two workers": {"receiver": "live", "transport": "pull", "tensor_parallel_size": 2},
}


def swap(folder, case):
    return swap_and_compare(folder, **case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_after_each_update_the_engine_is_the_trainer(folder, case):
    for rank, seen, versions in forked(swap, str(folder), CASES[case]):
        assert versions == [0, 1, 2]
        for equal, gap, _ in seen:
            assert all(equal), f"rank {rank}: greedy completions differ"
            assert gap < FP32_GAP, f"rank {rank}"
        assert consecutive_samples_differ(seen), "the updates changed nothing, so equality proves nothing"


@pytest.mark.slow
def test_after_each_update_the_engine_is_the_peft_model(folder):
    args = {"receiver": "live", "transport": "pull", **WITH_LORA}
    for seen in forked(swap_adapters, str(folder), args):
        assert all(gap < FP32_GAP for gap, _, _ in seen)
        whole, *later = [num_bytes for _, _, num_bytes in seen]
        assert all(num_bytes < whole / 5 for num_bytes in later)


@pytest.mark.slow
def test_one_process_may_pull_too_and_its_weights_may_move(folder):
    model, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    with SamplingEngine(str(folder), transport="pull", **TINY_ENGINE) as engine:
        for step in range(3):
            perturb(model, reference, seed=step)
            if step == 1:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            assert engine.update(model, step).transport == "pull"
            equal, gap, _ = compare(engine, reference)
            assert all(equal)
            assert gap < FP32_GAP


def test_an_engine_that_cannot_pull_says_so_and_an_unknown_transport_is_refused_at_once(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with (
        SamplingEngine(str(folder), inference="transformers", channel="inline", transport="pull") as engine,
        pytest.raises(ConfigError, match="transport='pull' cannot be used: the engine does not offer it"),
    ):
        engine.update(model, 0)
    with HFEngine(str(folder)) as engine:
        assert engine.update(model, 0).transport == "push"
    with pytest.raises(ValueError, match="transport='pul' is not known: it must be one of auto, push"):
        SamplingEngine(str(folder), transport="pul")
