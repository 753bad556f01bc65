"""Sizes of vLLM's engines on simulated devices, from vLLM's defaults for our usage context."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine

from vectorlm.runs.preflight.memory import step_sizes
from vectorlm.sampling.backends.vllm.shim import build_engine, default_arguments

GIB = 1 << 30
COMMON = {
    "dtype": "torch.bfloat16",
    "ahead": True,
    "runner": True,
    "graphs": "FULL_AND_PIECEWISE",
    "largest graph": 512,
    "share": 0.35,
    "autotune": False,
}
OF_24GB = COMMON | {
    "engines": 1,
    "devices": 1,
    "executor": "uni",
    "sequences": 256,
    "tokens": 8192,
    "sleeps": True,
}
OF_80GB = OF_24GB | {"sequences": 1024, "tokens": 16384}
OF_EIGHT = OF_80GB | {"engines": 4, "devices": 2, "executor": "mp", "sleeps": False}
ENGINES = {
    f"{machine}_{task}": engine | {"rank": 32 if task == "lora" else None}
    for machine, engine in {"1x24gb": OF_24GB, "1x80gb": OF_80GB, "8x80gb": OF_EIGHT}.items()
    for task in ("grpo", "lora", "sft")
}
SMALL = {"sequences": 8, "tokens": 1024, "graphs": "NONE", "largest graph": 0, "share": 0.7, "rank": 16}
ENGINES["1x24gb_qlora"] = OF_24GB | SMALL
ENGINES["8x80gb_long"] = OF_EIGHT | {"rank": None}


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


def test_on_cuda_an_engine_leaves_most_of_its_device_to_the_trainer_and_does_not_tune_flashinfer(tmp_path):
    on_cuda, on_cpu = (default_arguments(str(tmp_path), on_cpu=is_cpu) for is_cpu in (False, True))
    special = {"gpu_memory_utilization": 0.35, "enable_flashinfer_autotune": False}
    assert special.items() <= on_cuda.items()
    assert not special.keys() & on_cpu.keys()


@pytest.mark.slow  # vLLM on another platform needs a separate process, which takes 20 s.
def test_the_engines_of_every_config_for_gpus_are_what_vllm_makes_of_them_there(tmp_path):
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    import sizes

    for name in ("Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen2.5-7B"):
        sizes.make_folder(tmp_path / "models" / name, name)
        path = tmp_path / "models" / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["Qwen2ForCausalLM"]}))
    script = Path(__file__).with_name("cuda_arguments.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert dict(map(json.loads, done.stdout.splitlines())) == ENGINES
