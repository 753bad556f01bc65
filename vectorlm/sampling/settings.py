"""Settings of a sampling engine; a config has them in the section ``engine``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vectorlm.data.settings import PLAIN_CHAT, ChatSettings
from vectorlm.settings import Fraction, PositiveFloat, ReadIf, Text, also_written, inline, other_keys

Receivers = Literal["auto", "live", "packed"]
Transports = Literal["auto", "push", "bucketed", "pull"]
LoraMode = Literal["auto", "adapter", "merged"]
Channels = Literal["process", "inline"]
EngineDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], also_written({"half": "float16", "float": "float32"})
]

OF_VLLM = ReadIf(
    "engine.inference",
    ("vllm",),
    "Leave it out: other engines have arguments of their own.",
)
DEVICE_SHARE = 0.35
"""Default share of a device's memory for an engine, which shares the device with the trainer."""
WITH_LORA = ReadIf("train_parameters.lora_peft_config")


CHECKED_SLEEPS = 2
"""Sleeps before which the engine notes its log-probabilities. One is not enough for a run: its first update may bring
other weights than the model folder has, and then the comparison waits for the second."""
BUCKET_BYTES = 512 << 20
"""Size of the arena that the transport `bucketed` fills in rounds, or of the largest tensor if that is larger."""


@dataclass(frozen=True, kw_only=True)
class HandoverSettings:
    """Settings for the hand-over of the devices between trainer and engine."""

    sleep: Literal["none", "kv_cache", "all"] = "none"
    """Memory that the engine frees while the trainer works: none, its KV cache, or all, its weights too (CUDA)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state on the host while the engine samples (CUDA)."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The engine that samples. Other keys are arguments of vLLM's engine (`max_model_len`, `enforce_eager`, …), or of
    another `inference`."""

    inference: Text = "vllm"
    """Inference engine: `vllm`, `server` (of `vectorlm serve`), `transformers`, or `file.py:NAME` of a `Backend`."""
    dtype: EngineDtype = "auto"
    """The engine's dtype; `half` and `float` mean `float16` and `float32`, and `auto` is the trainer's on CPU, on CUDA
    vLLM's choice."""
    gpu_memory_utilization: Annotated[Fraction, OF_VLLM] = DEVICE_SHARE
    """Share of each device's memory that the engine may use."""
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
    """Longest silence tolerated from the engine or from a rank, and longest call of a reward in evaluations, in
    seconds."""
    turn: HandoverSettings = inline(HandoverSettings)
    sampling_params: Mapping[str, Any] = field(default_factory=dict, metadata={"is_setting": False})
    """Sampling parameters of calls without their own; a config has them in the section ``evaluation``."""
    chat: ChatSettings = field(default=PLAIN_CHAT, metadata={"is_setting": False})
    """The chat template; `chat_template` and `chat_template_kwargs` are keywords of `SamplingEngine`."""
    engine_args: Mapping[str, Any] = other_keys()

    @property
    def lora_mode_of_run(self) -> str:
        """The mode that `auto` means in a run with `lora_peft_config`: `adapter` or `merged`."""
        if self.lora_mode == "auto":
            return "adapter" if self.inference == "vllm" else "merged"
        return self.lora_mode
