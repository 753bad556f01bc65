"""How large vLLM's steps are on devices that are not here: its own defaults, for the context that we build it in."""

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine

from vectorlm.backends.vllm.shim import build_engine, default_arguments
from vectorlm.preflight.memory import step_sizes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "num_gib", "tokens", "sequences"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, 16384, 1024),
        ("NVIDIA H200", 139.8, 16384, 1024),
        ("NVIDIA GeForce RTX 4090", 23.6, 8192, 256),
    ],
)
def test_an_engine_on_cuda_samples_from_as_many_sequences_as_vllm_s_own_class(
    name, num_gib, tokens, sequences, monkeypatch, tmp_path
):
    built = []
    monkeypatch.setattr(LLMEngine, "from_engine_args", lambda *arguments: built.append(arguments))
    build_engine(str(tmp_path), {"skip_tokenizer_init": True}, on_cpu=False)
    build_engine(str(tmp_path), {"skip_tokenizer_init": True}, on_cpu=True)
    contexts = [context for _, context in built]
    assert contexts == [UsageContext.LLM_CLASS, UsageContext.ENGINE_CONTEXT]
    num_bytes = int(num_gib * GIB)
    monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda self, index=0: num_bytes)
    monkeypatch.setattr(type(current_platform), "get_device_name", lambda self, index=0: name)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    default_tokens, default_sequences = EngineArgs.get_batch_defaults(1)
    assert (default_tokens[contexts[0]], default_sequences[contexts[0]]) == (tokens, sequences)
    assert step_sizes(num_bytes) == (tokens, sequences), "what the memory plan expects"


def test_flashinfer_is_not_tuned_at_the_start_on_cuda(tmp_path):
    assert default_arguments(str(tmp_path), on_cpu=False)["enable_flashinfer_autotune"] is False
    assert "enable_flashinfer_autotune" not in default_arguments(str(tmp_path), on_cpu=True)
