"""Which LoRA options an engine can follow, and how large its adapters must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# fmt: off
SERVED = frozenset(
    {
        "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        "lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        "qalora_group_size", "megatron_core", "runtime_config",
        "task_type", "peft_type", "peft_version", "inference_mode", "base_model_name_or_path", "revision",
        "auto_mapping",
    }
)
# fmt: on
"""What vLLM's LoRA layers compute with, or what only matters while training or when it starts."""

MERGEABLE = frozenset({"use_dora", "bias", "modules_to_save"})
"""Options that end up in the base model's own tensors, which `merged` publishes."""

STARTS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is."""

WRITES, SCORES = "CAUSAL_LM", "SEQ_CLS"
"""What PEFT calls a language model, and a reward model."""

ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as ``max_lora_rank`` (0.26 to 0.32)."""

MERGED = 'train_parameters.sampler.lora_mode: merged (in Python SamplingEngine(..., lora_mode="merged"))'
"""What an engine follows that merged weights express."""

Refusal = tuple[str, Any, str, str]
"""Option, value, the rule that it breaks, the fix."""


def refused_options(options: Mapping[str, Any], lora_mode: str) -> Iterator[Refusal]:
    """Yield the options of ``peft.LoraConfig`` that an engine cannot follow in mode `adapter` or `merged`."""
    for option, value in options.items():
        if option in SERVED or value in (None, False, "none") or value in ([], {}, ()):
            continue
        if option not in MERGEABLE:
            rule = "changes the model in a way that neither vLLM's LoRA layers nor merged weights express"
            yield option, value, rule, "Leave it out."
        elif lora_mode == "adapter":
            rule = "is beyond vLLM's LoRA layers"
            yield option, value, rule, f"Leave it out, or use {MERGED}, which publishes merged weights."
    if lora_mode == "adapter" and (rank := largest_rank(options)) > ENGINE_RANKS[-1]:
        rule = f"is beyond vLLM's largest adapter rank of {ENGINE_RANKS[-1]}"
        yield "r", rank, rule, f"Use a smaller rank, or {MERGED}."


def refused_starts(options: Mapping[str, Any], kind: str = WRITES) -> Iterator[Refusal]:
    """Yield what adapters cannot start with: a base of their own, which no export holds, frozen, of another kind."""
    if options.get("inference_mode"):
        yield "inference_mode", True, "freezes the adapters: nothing would be trained", "Leave it out."
    if (given := options.get("task_type", kind)) != kind:
        yield "task_type", given, "makes adapters for another kind of model", "Leave it out."
    start = options.get("init_lora_weights", True)
    if (start.lower() if isinstance(start, str) else start) not in STARTS:
        rule = "trains adapters of another base than the one that their export is loaded on"
        yield "init_lora_weights", start, rule, "Use true, gaussian or orthogonal."


def moving_references(options: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield the options with which a policy without its adapters is not what it was before training."""
    if (bias := options.get("bias", "none")) != "none":
        yield "bias", bias, "trains biases of the base, which is the reference", "Use none."
    if options.get("init_lora_weights", True) is False:
        rule = "starts from another policy than the base, which is the reference"
        yield "init_lora_weights", False, rule, "Use true."


def largest_rank(options: Mapping[str, Any]) -> int:
    """Return the largest rank that any layer's adapter has; PEFT's default is 8."""
    return max([int(options.get("r", 8)), *map(int, (options.get("rank_pattern") or {}).values())])


def engine_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that make room for these adapters, and for no others.

    Every layer with room for an adapter pays for it at each step, so the engine gets the names of those that have one.
    """
    rank = next(each for each in ENGINE_RANKS if each >= largest_rank(options))
    arguments: dict[str, Any] = {"enable_lora": True, "max_lora_rank": rank}
    targets = options.get("target_modules")
    if isinstance(targets, (list, tuple)) and targets:
        arguments["lora_target_modules"] = sorted({str(name).rpartition(".")[2] for name in targets})
    return arguments
