import json
from pathlib import Path

import pytest
from config_texts import MINIMAL

from vectorlm.config import load_config
from vectorlm.errors import ConfigError
from vectorlm.preflight import vllm
from vectorlm.preflight.settings import check_config
from vectorlm.preflight.vllm import CPU_HEAD_SIZES, head_size_without_kernel

NARROW = {"hidden_size": 64, "num_attention_heads": 4}
SAMPLER = "train_parameters.sampler={sample_frequency: 2, prompts: [a]}"


@pytest.fixture
def engine_on_cpu(monkeypatch):
    monkeypatch.setattr(vllm, "versions_of", lambda names: dict.fromkeys(names, "0.32.0"))


def test_the_head_size_is_the_one_given_or_the_width_over_the_heads(engine_on_cpu):
    assert head_size_without_kernel(NARROW) == 16
    assert head_size_without_kernel({**NARROW, "head_dim": None}) == 16
    assert head_size_without_kernel({**NARROW, "head_dim": 48}) == 48
    assert head_size_without_kernel({**NARROW, "head_dim": 32}) is None
    assert head_size_without_kernel({"hidden_size": 64, "num_attention_heads": 2}) is None


def test_where_nothing_is_known_nothing_is_said(engine_on_cpu, monkeypatch):
    assert head_size_without_kernel({}) is None
    assert head_size_without_kernel({"hidden_size": 64, "num_attention_heads": 0}) is None
    assert head_size_without_kernel({**NARROW, "kv_lora_rank": 8}) is None
    monkeypatch.setattr(vllm, "versions_of", lambda names: {})
    assert head_size_without_kernel(NARROW) is None, "an engine on CUDA has other kernels"


def test_the_list_is_vllms_own():
    backend = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    assert backend.CPUAttentionBackend.get_supported_head_sizes() == list(CPU_HEAD_SIZES)


def test_the_check_refuses_a_model_only_where_it_is_sampled_from(engine_on_cpu, write_config):
    path = write_config(MINIMAL)
    Path("models/tiny").mkdir(parents=True)
    Path("models/tiny/config.json").write_text(json.dumps(NARROW))
    for split in ("train", "eval"):
        Path("data", split).mkdir(parents=True)
        Path("data", split, "dataset_info.json").write_text("{}")
    check_config(load_config(path, []), 1, [])
    with pytest.raises(
        ConfigError, match=r"model='models/tiny' has attention heads of 16 dimensions, which vLLM"
    ):
        check_config(load_config(path, [SAMPLER]), 1, [])
