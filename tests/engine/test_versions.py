"""A token's version is the weights that sampled it: judged by its log-probability under every version."""

import pytest
from version_cases import check_labels

from vectorlm import HFEngine

TINY_LLAMA = {"hidden_size": 64, "max_length": 256}
# Too few slots for a group, and too little memory for two long completions, so that vLLM preempts some.
ENGINE_ARGS = {"max_model_len": 256, "max_num_seqs": 3, "kv_cache_memory_bytes": 384 << 10}
WAYS = ("keep", "recompute")


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", WAYS)
def test_vllm_says_which_weights_sampled_a_token(engine, folder, in_flight):
    check_labels(engine, folder, in_flight)


@pytest.mark.parametrize("in_flight", WAYS)
def test_transformers_says_which_weights_sampled_a_token(folder, in_flight):
    with HFEngine(folder, batch_size=3) as engine:
        check_labels(engine, folder, in_flight, pause_s=0.0, n=4, max_tokens=100, rounds=2)
