"""Print vLLM's arguments for the engines of configs/cuda on simulated devices: python cuda_arguments.py FOLDER.

For vllm 0.32. vLLM's CUDA platform runs on a simulated driver that describes one of `DEVICES`. The script computes
nothing and needs no kernels. The models in FOLDER are config files without weights.
"""

from __future__ import annotations

import json
import os
import sys
import types
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """A driver's description of several equal devices."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    count: int = 1


DEVICES = {
    "1x24gb": Device("NVIDIA GeForce RTX 4090", (8, 9), 23.6),
    "1x80gb": Device("NVIDIA H100 80GB HBM3", (9, 0), 79.1),
    "8x80gb": Device("NVIDIA H100 80GB HBM3", (9, 0), 79.1, 8),
}


def pretend(device: Device) -> None:
    """Make torch and vLLM find this device, and no other."""
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_qutlass_C"):
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(name))
    import torch
    import vllm.third_party.pynvml as nvml

    total = int(device.memory_gib * GIB)
    memory = types.SimpleNamespace(total=total, free=total, used=0)
    major, minor = device.capability
    properties = types.SimpleNamespace(
        total_memory=total, major=major, minor=minor, name=device.name, multi_processor_count=132
    )
    nvml.nvmlInit = nvml.nvmlShutdown = lambda *arguments: None
    nvml.nvmlDeviceGetCount = lambda: device.count
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: device.capability
    nvml.nvmlDeviceGetName = lambda handle: device.name
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: memory
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    nvml.nvmlDeviceGetP2PStatus = lambda *arguments: 0
    torch.version.cuda = "13.0"
    torch.cuda._is_compiled = torch.cuda.is_available = lambda: True
    torch.cuda.device_count = torch.cuda._device_count_nvml = lambda: device.count
    torch.cuda.get_device_capability = lambda index=None: device.capability
    torch.cuda.get_device_properties = lambda index=None: properties

    import vllm.platforms
    import vllm.triton_utils
    from vllm.platforms.cuda import CudaPlatform

    CudaPlatform.is_sleep_mode_available = CudaPlatform.is_cumem_allocator_available = lambda self=None: True
    vllm.platforms._current_platform = CudaPlatform()
    vllm.triton_utils.HAS_TRITON = vllm.triton_utils.importing.HAS_TRITON = True
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True

    from vllm.model_executor.models import registry

    class Text(torch.nn.Module):
        """A text model with the attributes that vLLM reads; vLLM's own class would import kernels."""

        def __init__(self, *, vllm_config, prefix=""): ...

        def embed_input_ids(self, input_ids): ...

        def forward(self, input_ids, positions): ...

        def compute_logits(self, hidden_states): ...

    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(Text)


def engine_of(path: Path, device: Device) -> dict[str, object]:
    """Return vLLM's settings of a config's engine on the first of these devices."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from vectorlm.ranks.topology import Topology
    from vectorlm.runs import start
    from vectorlm.runs.config.load import load_config
    from vectorlm.sampling.arguments import parallel_sizes
    from vectorlm.sampling.backends.vllm.shim import build_engine

    topology = Topology(world_size=device.count, local_world_size=device.count, device="cuda:0")
    asked, built = {}, []

    class Asked(ExitStack):
        def __init__(self, model, settings, **arguments):
            super().__init__()
            asked.update(arguments, gpu_memory_utilization=settings.gpu_memory_utilization)

        def sleep(self, **parts): ...

    start.SamplingEngine, before = Asked, start.SamplingEngine
    LLMEngine.from_engine_args = lambda arguments, context: built.append(
        arguments.create_engine_config(context)
    )
    try:
        config = load_config(path)
        with ExitStack() as stack:
            start.open_engine(config, topology, stack)
    finally:
        start.SamplingEngine = before
    given = {
        name: argument for name, argument in asked.items() if name not in ("topology", "devices", "log_path")
    }
    sizes = parallel_sizes(given, topology, config.model)
    engines_of_node = sizes.pop("data_parallel_size")
    build_engine(str(config.model), {**given, **sizes}, on_cpu=False)
    (made,) = built
    return {
        "engines": engines_of_node,
        "devices": made.parallel_config.tensor_parallel_size,
        "executor": made.parallel_config.distributed_executor_backend,
        "dtype": str(made.model_config.dtype),
        "sequences": made.scheduler_config.max_num_seqs,
        "tokens": made.scheduler_config.max_num_batched_tokens,
        "ahead": made.scheduler_config.async_scheduling,
        "runner": made.use_v2_model_runner,
        "graphs": str(made.compilation_config.cudagraph_mode),
        "largest graph": max(made.compilation_config.cudagraph_capture_sizes or [0]),
        "sleeps": made.model_config.enable_sleep_mode,
        "share": made.cache_config.gpu_memory_utilization,
        "autotune": made.kernel_config.enable_flashinfer_autotune,
        "rank": made.lora_config and made.lora_config.max_lora_rank,
    }


def main() -> None:
    """Print a line of JSON for each config."""
    os.chdir(sys.argv[1])
    for path in sorted((ROOT / "configs/cuda").glob("*.yaml")):
        device = DEVICES[path.stem.partition("_")[0]]
        pretend(device)
        print(json.dumps([path.stem, engine_of(path, device)]), flush=True)


if __name__ == "__main__":
    main()
