"""After each update, vLLM has the trainer's weights, with every transport and model.

tests/sampling/weights/test_transports.py tests the transports without vLLM. test_families.py and test_engine.py test
other receivers and heads. test_several_ranks.py has two engines that pull, and test_lora_engine.py has adapters.
"""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from kit.families import WITH_BUFFERS, save_family
from kit.rank_processes import forked, save_tiny_llama
from kit.tiny_engine import TINY_ENGINE
from swap_cases import (
    FP32_GAP,
    GREEDY,
    compare,
    consecutive_samples_differ,
    largest_gap,
    perturb,
    require_the_trainers_answers,
    swap_and_compare,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from vectorlm import HFEngine, SamplingEngine, exact
from vectorlm.errors import ConfigError

# bf16 has 8 bits: with logits of a few units, 0.1 is round-off, and a stale tensor makes a difference of 1 or more.
BF16_GAP = 0.15

TINY_LLAMA = {"tied": True, "hidden_size": 64, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("llama", "engine_args"),
    [
        ({"hidden_size": 64}, {"receiver": "packed"}),
        pytest.param(
            TINY_LLAMA,
            {"receiver": "live", "transport": "bucketed", "bucket_bytes": 1 << 14, "exact": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            TINY_LLAMA,
            {"receiver": "live", "transport": "pull", "tensor_parallel_size": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["packed", "bucketed", "pull, two workers"],
)
def test_after_each_update_the_engine_is_the_trainer(tmp_path, llama, engine_args):
    folder = save_tiny_llama(tmp_path / "model", **llama)
    for _, seen, versions in forked(partial(swap_and_compare, **engine_args), str(folder)):
        assert versions == [0, 1, 2]
        require_the_trainers_answers(seen, is_exact="exact" in engine_args)


class WithHead(torch.nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.lm, self.head = lm, torch.nn.Linear(48, 1)

    def forward(self, ids):
        return self.head(self.lm(ids).logits)


def update_from_a_wrapper(folder):
    """Send the language model of a sharded wrapper after forward passes without backward; return the gaps."""
    wrapper = WithHead(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    fully_shard(wrapper, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer, ids = torch.optim.SGD(wrapper.parameters(), lr=0.05), torch.tensor([[2, 3, 4, 5]])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gaps = []
    with HFEngine(folder) as engine:
        for step in range(3):
            wrapper(ids).square().sum().backward()
            with torch.no_grad():
                wrapper(ids)
            if step:
                optimizer.step()
            optimizer.zero_grad()
            engine.update(wrapper.lm, step)
            ((completion,),) = engine.sample([[5, 6, 7]], GREEDY)
            weights = {
                name: tensor.full_tensor() for name, tensor in wrapper.lm.state_dict(keep_vars=True).items()
            }
            reference.load_state_dict(weights)
            gaps.append(largest_gap([completion], reference))
    return gaps


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_language_model_of_a_sharded_wrapper_is_sent_as_the_trainer_holds_it(folder, world_size):
    for gaps in forked(update_from_a_wrapper, str(folder), world_size=world_size):
        assert max(gaps) < FP32_GAP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "world_size", "limit"),
    [
        ("GLM-4-MoE", 2, FP32_GAP),
        # vLLM stores the numbers of Apertus' activation in bf16; stale numbers would make a gap of 0.3.
        ("Apertus", 1, BF16_GAP),
        # dots.llm1 has the same router buffer as GLM-4-MoE.
        pytest.param("dots.llm1", 2, FP32_GAP, marks=pytest.mark.long),
    ],
)
def test_buffers_that_the_model_computes_with_are_sent_as_parameters_are(tmp_path, family, world_size, limit):
    folder = str(save_family(WITH_BUFFERS[family], tmp_path / "model"))
    for rank, seen, _ in forked(swap_and_compare, folder, "live", 2, world_size=world_size):
        assert max(gap for _, gap, _ in seen) < limit, f"rank {rank}"
        assert consecutive_samples_differ(seen)


@pytest.mark.slow
def test_a_bf16_engine_follows_an_fp32_trainer(tmp_path):
    folder = save_tiny_llama(tmp_path / "model", tied=True, hidden_size=64)
    for _, seen, _ in forked(swap_and_compare, str(folder), "packed", 2, "bfloat16"):
        assert all(gap < BF16_GAP for _, gap, _ in seen)
        assert consecutive_samples_differ(seen)


@pytest.mark.slow
def test_one_process_may_pull_too_and_its_weights_may_move(folder):
    model, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    exact(reference)
    with SamplingEngine(str(folder), transport="pull", receiver="live", exact=True, **TINY_ENGINE) as engine:
        for step in range(3):
            perturb(model, reference, seed=step)
            if step == 1:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            assert engine.update(model, step).transport == "pull"
            equal, gap, _ = compare(engine, reference)
            assert all(equal)
            assert gap == 0.0


def test_an_engine_that_cannot_pull_says_so_and_an_unknown_transport_is_refused_at_once(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with (
        SamplingEngine(str(folder), inference="transformers", channel="inline", transport="pull") as engine,
        pytest.raises(ConfigError, match="transport='pull'"),
    ):
        engine.update(model, 0)
    with HFEngine(str(folder)) as engine:
        assert engine.update(model, 0).transport == "push"
    with pytest.raises(ValueError, match="transport='pul'"):
        SamplingEngine(str(folder), transport="pul")


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["refuse", "keep"])
def test_embeddings_of_images_do_not_outlive_the_weights_that_computed_them(folder, monkeypatch, in_flight):
    """The engine gets two updates, with and without running requests."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    extension = {"worker_extension_cls": "left_embeddings.LeavesAnEmbedding"}
    with SamplingEngine(str(folder), **extension, **TINY_ENGINE) as engine:
        for step in range(2):
            if in_flight == "keep":
                handle = engine.submit([[2, 3]], {"max_tokens": 40, "ignore_eos": True})
            engine.update(model, step, in_flight=in_flight)
            if in_flight == "keep":
                handle.result()
