"""vLLM's Model Runner V2, the default on CUDA; here Triton's interpreter computes its kernels on CPU.

`VECTORLM_TRITON` is a folder with Triton's ordinary wheel. docs/dev/gpu.md has the command for more tests on V2.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit.tiny_engine import TINY_ENGINE
from swap_cases import FP32_GAP
from test_families import swap

from vectorlm import SamplingEngine
from vectorlm.sampling.backends.vllm.extension import WeightExtension

TINY_LLAMA = {"hidden_size": 64}  # V2's attention on CPU does not support a head size of 16.
INTERPRETER = Path(__file__).parents[1] / "kit/runner_v2"


@pytest.mark.parametrize(
    ("module", "generation"),
    [
        ("vllm.v1.worker.gpu.model_runner", "V2"),
        ("vllm.v1.worker.gpu_model_runner", "V1"),
        ("vllm.v1.worker.cpu_model_runner", "V1"),
    ],
)
def test_a_runner_is_named_with_its_generation(module, generation):
    original = type("GPUModelRunner", (), {"__module__": module})
    runner = type("OtherRunner", (original,), {"__module__": "vllm.v1.worker.elsewhere"})()
    worker = SimpleNamespace(model_runner=runner)
    assert WeightExtension.vectorlm_runner(worker) == (f"{generation} (OtherRunner)", None)


@pytest.mark.slow
@pytest.mark.skipif("VECTORLM_TRITON" not in os.environ, reason="VECTORLM_TRITON names no folder with Triton")
def test_on_v2_an_updated_engine_has_the_log_probabilities_of_a_fresh_one(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(INTERPRETER), prepend=os.pathsep)
    with SamplingEngine(str(folder), **TINY_ENGINE) as engine:
        assert "model runner V2" in engine.runner
    seen, (swapped, fresh), _, (spoiled, text), _ = swap(str(folder), "live")
    assert swapped == fresh
    assert max(gap for _, gap, _ in seen) < FP32_GAP
    assert spoiled in text
