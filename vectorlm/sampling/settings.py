"""Settings of a sampling engine; a config has them in the section ``engine``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vectorlm.data.settings import PLAIN_CHAT, ChatSettings
from vectorlm.settings import Fraction, PositiveFloat, ReadIf, Text, also_written, inline, other_keys

Receivers = Literal["auto", "live", "packed"]
Transports = Literal["auto", "push", "bucketed", "pull"]
Quantisation = Literal["fp8_per_channel", "int8"]
LoraMode = Literal["auto", "adapter", "merged"]
Channels = Literal["process", "inline"]
EngineDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], also_written({"half": "float16", "float": "float32"})
]

OF_VLLM = ReadIf(
    "engine.inference",
    ("vllm",),
    "Leave it out: it applies only to vLLM.",
)
DEVICE_SHARE = 0.35
"""Default share of a device's memory for an engine, which shares the device with the trainer."""
WITH_LORA = ReadIf("train_parameters.lora_peft_config")


CHECKED_SLEEPS = 2
"""Sleeps before which the engine notes its log-probabilities. One is not enough for a run: its first update may bring
other weights than the model folder has, and then the comparison waits for the second."""
BUCKET_BYTES = 512 << 20
"""Size of the arena that the transport `bucketed` fills in rounds, or of the largest tensor if that is larger."""


RETURN_ROUTES = "enable_return_routed_experts"
"""vLLM's argument for `Completion.routes`."""
# fmt: off
EXACT_FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite", "olmo2", "olmo3", "phi3", "smollm3",
    "mixtral", "olmoe", "qwen3_moe",
)
"""Values of `model_type` for which tests/sampling/test_exact.py compares the bits of engine and trainer."""
EXACT_ARGUMENTS = frozenset({
    "gpu_memory_utilization", "kv_cache_memory_bytes", "max_model_len", "max_logprobs", "seed",
    "max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching", "enable_chunked_prefill",
    "disable_log_stats", "skip_tokenizer_init", "tokenizer", "tokenizer_revision", "revision", "trust_remote_code",
    "load_format", "download_dir", "scheduling_policy", "data_parallel_size", "long_prefill_token_threshold",
    "enable_sleep_mode", "structured_outputs_config", RETURN_ROUTES,
})
# fmt: on
"""Arguments of vLLM's engine that do not change the bits of log-probabilities."""
EXACT_ROPES = {"default", "linear", "llama3", "yarn"}
"""Types of rotary positions that these tests cover."""
EXACT_VALUES = {
    **{"inference": ("vllm",), "dtype": ("float32", "float"), "receiver": ("live", "auto")},
    **{"lora_mode": ("merged", "auto"), "enforce_eager": (True,)},
}
"""Values of an engine's settings and arguments with which it can be exact."""


def why_not_exact(description: Mapping[str, Any]) -> str | None:
    """Return why a model with this config.json cannot be exact, as a clause; None if it can."""
    if (kind := description.get("model_type")) not in EXACT_FAMILIES:
        return f"exact needs a model of one of the families {', '.join(EXACT_FAMILIES)}, and this one is {kind!r}"
    ropes = [description.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    # Some families have one for each kind of layer.
    parts = [part for rope in ropes for part in (rope, *rope.values()) if isinstance(part, Mapping)]
    if odd := {part.get("rope_type", part.get("type", "default")) for part in parts} - EXACT_ROPES:
        return f"exact needs rotary positions of a type in {sorted(EXACT_ROPES)}, and this model has {odd.pop()!r}"
    return None


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts of a layer in config.json."""


def has_experts(description: Mapping[str, Any]) -> bool:
    """Return whether a model's config.json mentions several experts."""
    sections = (description, description.get("text_config") or {})
    return any(
        "expert" in name and type(value) is int and value > 1
        for section in sections
        for name, value in section.items()
    )


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
    quantization: Annotated[Quantisation | None, OF_VLLM] = None
    """8-bit weights and activations of the linear layers, with a scale per row and token; the output layer and the
    embeddings stay in 16 bits. null keeps `dtype`."""
    gpu_memory_utilization: Annotated[Fraction, OF_VLLM] = DEVICE_SHARE
    """Share of each device's memory that the engine may use."""
    receiver: Receivers = "auto"
    """Whether the engine loads new weights in place (`live`) or repacks them for its own kernels (`packed`)."""
    transport: Transports = "auto"
    """How weights reach the engine: pushed through shared memory, whole or in pieces, or pulled by vLLM (default on
    CUDA)."""
    lora_mode: Annotated[LoraMode, WITH_LORA] = "auto"
    """With LoRA: swap the adapters alone (`adapter`, which `auto` is for vLLM), or weights with them (`merged`)."""
    verify_updates: bool = True
    """After each update, compare a checksum of the engine's weights with a checksum of the sent weights."""
    check_finite: bool = True
    """Refuse an update with NaN or infinity in its weights, before the engine's weights change."""
    timeout_s: PositiveFloat = 300.0
    """Longest silence tolerated from the engine or from a rank, in seconds; without `rl`, also longest call of a
    reward."""
    start_timeout_s: PositiveFloat = 1800.0
    """Seconds that the engine may take to load; a server gets half as long, at most 600."""
    turn: HandoverSettings = inline(HandoverSettings)
    exact: bool = field(default=False, metadata={"is_setting": False})
    """Whether `vectorlm.exact` reproduces the bits of vLLM's log-probabilities (CPU, float32, `live`); a config has it
    in the section ``train_parameters``."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict, metadata={"is_setting": False})
    """Sampling parameters of calls without their own; a config has them in the section ``evaluation``."""
    chat: ChatSettings = field(default=PLAIN_CHAT, metadata={"is_setting": False})
    """The chat template; `chat_template` and `chat_template_kwargs` are keywords of `SamplingEngine`."""
    engine_args: Mapping[str, Any] = other_keys()

    @property
    def lora_mode_of_run(self) -> str:
        """The mode that `auto` means in a run with `lora_peft_config`: `adapter` or `merged`."""
        if self.lora_mode == "auto":
            return "adapter" if self.inference == "vllm" and not self.exact else "merged"
        return self.lora_mode

    def unsupported(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, str]]:
        """Yield name, value, rule and fix of settings and `arguments` that this library does not support."""
        num_engines = arguments.get("data_parallel_size")
        if self.inference == "server" and num_engines not in (None, 1):
            rule = "must be 1 with inference: server, because a server takes updates from one client only"
            yield "data_parallel_size", num_engines, rule, "Leave it out."
        num_stages = arguments.get("pipeline_parallel_size")
        if self.inference == "vllm" and num_stages not in (None, 1):
            rule = "must be 1, because an update needs workers that hold parts of all layers"
            yield "pipeline_parallel_size", num_stages, rule, "Use tensor_parallel_size."
        drafts = arguments.get("speculative_config")
        method = drafts.get("method") if isinstance(drafts, Mapping) else drafts
        if self.inference == "vllm" and drafts is not None and method != "ngram":
            rule = "must be ngram: no other method is tested with weights that change"
            yield "speculative_config.method", method, rule, "Use ngram, or leave speculative_config out."
        if self.quantization is None:
            return
        dtype = arguments.get("dtype", self.dtype)
        if str(dtype).removeprefix("torch.") not in ("auto", "bfloat16", "float16", "half"):
            rule = "must have 16 bits with quantization, because the kernels compute in them"
            yield "dtype", dtype, rule, "Use bfloat16."
        if self.transport == "pull":
            rule = "cannot be used with quantization: the ranks compute what they send"
            yield "transport", self.transport, rule, "Use auto."

    def exact_problems(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, str]]:
        """Yield name, value, rule and fix of settings and `arguments` with which no engine is known to be exact."""
        own = {name: getattr(self, name) for name in ("inference", "receiver", "lora_mode")}
        for name, value in {**own, **arguments}.items():
            allowed = EXACT_VALUES.get(name, (value,) if name in EXACT_ARGUMENTS else ())
            if value not in allowed:
                fix = f"Use {allowed[0]}." if allowed else "Leave it out."
                yield name, value, "cannot be used with exact: log-probabilities may get other bits", fix
