"""Find the settings that prevent trainer and engine from sharing one base in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vectorlm.runs.config.schema import Config
from vectorlm.runs.config.setting import refuse, to_plain, value_at
from vectorlm.runs.config.value import show
from vectorlm.runs.preflight.local_model import four_bit_method_of

SHARE_BASE = "train_parameters.share_base"
_VALUES: Mapping[str, tuple[Any, ...]] = {
    **{f"train_parameters.{name}": (False,) for name in ("exact", "cpu_offload")},
    **{f"train_parameters.{name}": (1,) for name in ("tensor_parallel", "expert_parallel")},
    **{"train_parameters.quantization": (None,), "engine.quantization": (None,)},
    "engine.inference": ("vllm",),
    "engine.lora_mode": ("adapter", "auto"),
    # In sleep mode, vLLM's memory on CUDA has no handles, even for weights that stay awake.
    "engine.sleep": ("none", "kv_cache"),
    **{f"engine.{name}_parallel_size": (1, None) for name in ("tensor", "pipeline")},
    **{"engine.enable_expert_parallel": (False, None), "engine.cpu_offload_gb": (0, None)},
}
"""Values of settings with which the engine holds every whole tensor of the base in the trainer's form."""
_CUDA_VALUES: Mapping[str, tuple[Any, ...]] = {
    "engine.sleep": ("none",),
    "rl.async.placement": ("shared", None),
}


def sharing_problems(config: Config, is_cuda: bool) -> Iterator[tuple[str, str]]:
    """Yield the settings of a run that forbid a shared base, each with its refusal."""
    if config.train_parameters.lora_peft_config is None:
        path = "train_parameters.lora_peft_config"
        rule = f"must be set, because {SHARE_BASE} shares the frozen base of LoRA"
        yield path, refuse(config, path, rule, "Set it, or leave share_base out.")
        return
    if not config.has_engine:
        rule = "needs an engine, but this run does not sample"
        yield "evaluation.prompts", refuse(config, SHARE_BASE, rule, "Leave it out.", True)
        return
    if (method := four_bit_method_of(config.model)) is not None:
        rule = f"cannot be in 4 bits ({method}) with {SHARE_BASE}"
        yield "model", refuse(config, "model", rule, "Leave share_base out.")
    plain = to_plain(config)
    for path, allowed in {**_VALUES, **(_CUDA_VALUES if is_cuda else {})}.items():
        if (value := value_at(plain, path)) not in allowed:
            fix = f"Use {show(allowed[0])}, or leave share_base out."
            yield path, refuse(config, path, f"cannot be used with {SHARE_BASE}", fix, value)
    trainer, engine = (
        config.train_parameters.model.dtype,
        str(config.engine_arguments(is_cuda).get("dtype", "auto")).replace("auto", "bfloat16"),
    )
    if engine != trainer and config.engine.inference == "vllm":
        rule = f"must equal the engine's dtype ({engine}) with {SHARE_BASE}"
        fix = f"Use {engine}, or set engine.dtype to {trainer}."
        yield "train_parameters.dtype", refuse(config, "train_parameters.dtype", rule, fix)


def shares_base(config: Config, is_cuda: bool) -> bool:
    """Return whether trainer and engine share one base in memory, as far as the config shows."""
    is_refused = config.train_parameters.share_base is False
    return not is_refused and next(sharing_problems(config, is_cuda), None) is None


def sharing_notes(config: Config, is_cuda: bool) -> Iterator[str]:
    """Yield a note on whether a run with adapters and an engine has its base once or twice in memory."""
    train = config.train_parameters
    if train.lora_peft_config is None or not config.has_engine:
        return
    found = ((SHARE_BASE, ""),) if train.share_base is False else sharing_problems(config, is_cuda)
    if (problem := next(iter(found), None)) is None:
        yield "share_base: the base is in memory once, shared by trainer and engine"
    else:
        value = show(value_at(to_plain(config), problem[0]))
        yield f"share_base: the base is in memory twice, in the trainer and in the engine ({problem[0]}: {value})"
