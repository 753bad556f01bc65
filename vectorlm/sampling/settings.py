"""Settings of a sampling engine; a config has them in the section ``train_parameters.sampler``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vectorlm.settings import Fraction, PositiveFloat, ReadIf, Text, also_written

Receivers = Literal["auto", "live", "packed"]
Transports = Literal["auto", "push", "bucketed", "pull"]
LoraMode = Literal["auto", "adapter", "merged"]
Channels = Literal["process", "inline"]
EngineDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], also_written({"half": "float16", "float": "float32"})
]

OF_VLLM = ReadIf(
    "train_parameters.sampler.inference",
    ("vllm",),
    "Leave it out: other engines have arguments of their own.",
)
DEVICE_SHARE = 0.35
"""Default share of a device's memory for an engine, which shares the device with the trainer."""
WITH_LORA = ReadIf("train_parameters.lora_peft_config")


BUCKET_BYTES = 512 << 20
"""Size of the arena that the transport `bucketed` fills in rounds, or of the largest tensor if that is larger."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings for sampling and for updates of the engine's weights."""

    gpu_memory_utilization: Annotated[Fraction, OF_VLLM] = DEVICE_SHARE
    """Share of each device's memory that the engine may use."""
    vllm_dtype: Annotated[EngineDtype, OF_VLLM] = "auto"
    """The engine's dtype; `half` and `float` mean `float16` and `float32`, and `auto` is the trainer's on CPU, on CUDA
    vLLM's choice."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.SamplingParams`."""
    inference: Text = "vllm"
    """Inference engine: `vllm`, `server` (of `vectorlm serve`), `transformers`, or `file.py:NAME` of a `Backend`."""
    engine_args: Mapping[str, Any] = field(default_factory=dict, metadata={"key": "engine"})
    """Further arguments of vLLM's engine (`max_model_len`, `enforce_eager`, ...), or of another `inference`."""
    receiver: Receivers = "auto"
    """Whether the engine loads new weights in place (`live`) or repacks them for its own kernels (`packed`)."""
    transport: Transports = "auto"
    """Transport of weights: pushed through shared memory at once or in rounds, or pulled by vLLM (default on CUDA)."""
    lora_mode: Annotated[LoraMode, WITH_LORA] = "auto"
    """With LoRA: swap the adapters alone (`adapter`, which `auto` is for vLLM), or weights with them (`merged`)."""
    verify_updates: bool = True
    """After each update, compare a checksum of the engine's weights with a checksum of what was sent."""
    check_finite: bool = True
    """Refuse an update with NaN or infinity in its weights, before the engine's weights change."""
    timeout_s: PositiveFloat = 300.0
    """Longest silence tolerated from the engine or from a rank, and longest call of `reward`, in seconds."""

    @property
    def lora_mode_of_run(self) -> str:
        """The mode that `auto` means in a run with `lora_peft_config`: `adapter` or `merged`."""
        if self.lora_mode == "auto":
            return "adapter" if self.inference == "vllm" else "merged"
        return self.lora_mode
