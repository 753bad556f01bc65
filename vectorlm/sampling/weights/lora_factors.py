"""LoRA in a PEFT model: the factors, and the options of `peft.LoraConfig` that an engine supports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vectorlm.errors import ConfigError, WeightMismatch
from vectorlm.sampling.weights.model_tensors import checkpoint_name

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoraFactors:
    """An adapter of a weight; it adds ``scaling * B @ A`` to it.

    Source: Hu et al. 2021, arXiv 2106.09685, eq. 3; the magnitude is Liu et al. 2024, arXiv 2402.09353, eq. 5. The
    order of the factors of experts is PEFT's (``peft.tuners.lora.layer.ParamWrapper``).
    """

    weight: str
    """The name of the weight in the base model."""
    a: torch.Tensor
    """[r, in], float; for an embedding [r, vocabulary], for experts [experts * r, in]."""
    b: torch.Tensor
    """[out, r], float; for an embedding [dimensions, r], for experts [out, r * experts]."""
    scaling: float
    """alpha / r, or alpha / sqrt(r)."""
    is_transposed: bool
    """Whether the base weight is [in, out]: embeddings, GPT-2's layers, each of gpt-oss's experts."""
    magnitude: torch.Tensor | None = None
    """DoRA's length of each row of the weight, [out]; None for plain LoRA."""
    num_experts: int = 0
    """The experts of a weight of shape [experts, out, in]; 0 for a matrix."""

    @property
    def layer(self) -> str:
        """The name of the layer in the base model."""
        return self.weight.rpartition(".")[0]


def lora_factors(model: torch.nn.Module) -> list[LoraFactors]:
    """List the active adapters of `model`, layer by layer; empty without LoRA."""
    found = []
    for module_name, layer in model.named_modules():
        if not is_lora_layer(layer) or layer.disable_adapters:
            continue
        # Wrappers of two weights of one module are nested.
        name = checkpoint_name(f"{module_name}.{getattr(layer, 'parameter_name', 'weight')}")
        if layer.merged:
            raise WeightMismatch(
                f"the adapters of {name!r} are merged into its base weight. Call unmerge_adapter() before the update."
            )
        for adapter in layer.active_adapters:
            variant = type(layer.lora_variant.get(adapter)).__name__
            if variant not in ("NoneType", "DoraLinearVariant"):
                raise ConfigError(
                    f"the adapter of {name!r} is a {variant}; it must be LoRA, or DoRA on a linear layer. Leave that "
                    "layer out of target_modules, or use plain LoRA."
                )
            scaling = float(layer.scaling.get(adapter, 0.0))
            if adapter in layer.lora_A:
                factors = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
                if hasattr(layer, "parameter_name"):
                    is_stack = layer.get_param().ndim == 3
                    is_transposed = is_stack and bool(getattr(layer.get_base_layer(), "is_transposed", False))
                    num_experts = layer.num_experts if is_stack else 0
                    found.append(LoraFactors(name, *factors, scaling, is_transposed, None, num_experts))
                    continue
                magnitude = layer.lora_magnitude_vector[adapter].weight if variant != "NoneType" else None
                found.append(LoraFactors(name, *factors, scaling, bool(layer.fan_in_fan_out), magnitude))
            elif adapter in layer.lora_embedding_A:
                a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
                found.append(LoraFactors(name, a, b, scaling, True))
    return found


def is_lora_layer(module: Any) -> bool:
    """Whether `module` is a LoRA layer of PEFT. Tests its children, because peft may not be installed."""
    # `hasattr` of a missing attribute costs a microsecond per module, and a model has thousands.
    return {"lora_A", "lora_embedding_A", "base_layer"} <= module._modules.keys()


def require_expressible(model: torch.nn.Module, lora_mode: str) -> None:
    """Raise `ConfigError` for adapters that the engine does not support in `lora_mode`, `adapter` or `merged`."""
    layers: list[Any] = [module for module in model.modules() if is_lora_layer(module)]
    if not layers:
        return
    owner: Any = next((module for module in model.modules() if hasattr(module, "peft_config")), None)
    for adapter in sorted({adapter for layer in layers for adapter in layer.active_adapters}):
        options = owner.peft_config[adapter].to_dict() if owner is not None else {}
        for option, value, rule, fix in refused_options(options, lora_mode):
            raise ConfigError(f"the model's LoRA option {option}={value!r} {rule}. {fix}")


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
"""Options that vLLM's LoRA layers support, or that matter only to the training."""

MERGEABLE = frozenset({"use_dora", "bias", "modules_to_save", "target_parameters"})
"""Options that end up in the base model's tensors, which mode `merged` sends."""

STARTS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that do not change the base."""

WRITES, SCORES = "CAUSAL_LM", "SEQ_CLS"
"""PEFT's names for a language model and a reward model."""

ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for ``max_lora_rank``."""

MERGED = 'engine.lora_mode: merged (in Python SamplingEngine(..., lora_mode="merged"))'
"""The advice in error messages to use merged weights."""

Refusal = tuple[str, Any, str, str]
"""Option, value, the broken rule, the fix."""


def refused_options(options: Mapping[str, Any], lora_mode: str) -> Iterator[Refusal]:
    """Yield the options of ``peft.LoraConfig`` that an engine does not support in mode `adapter` or `merged`."""
    for option, value in options.items():
        if option in SERVED or value in (None, False, "none") or value in ([], {}, (), set()):
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
    """Yield options with which adapters cannot be trained: frozen, of another kind of model, or on a changed base."""
    if options.get("inference_mode"):
        yield "inference_mode", True, "freezes the adapters: nothing would be trained", "Leave it out."
    if (given := options.get("task_type", kind)) != kind:
        yield "task_type", given, "makes adapters for a different kind of model", "Leave it out."
    start = options.get("init_lora_weights", True)
    if (start.lower() if isinstance(start, str) else start) not in STARTS:
        rule = "trains adapters of a changed base, and their export would be loaded on the original base"
        yield "init_lora_weights", start, rule, "Use true, gaussian or orthogonal."


def moving_references(options: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield options that make the reference, which has the initial adapters, differ from the policy before training."""
    if (bias := options.get("bias", "none")) != "none":
        yield "bias", bias, "trains biases of the base, which the reference shares", "Use none."
    if options.get("init_lora_weights", True) is False:
        rule = "starts with adapters that are not zero, and the reference is the base without them"
        yield "init_lora_weights", False, rule, "Use true."


def largest_rank(options: Mapping[str, Any]) -> int:
    """Return the largest rank of any layer's adapter; PEFT's default is 8."""
    return max([int(options.get("r", 8)), *map(int, (options.get("rank_pattern") or {}).values())])


def engine_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which vLLM's engine supports these adapters.

    They name the layers with adapters, because every LoRA layer costs time at each step.
    """
    rank = next(size for size in ENGINE_RANKS if size >= largest_rank(options))
    arguments: dict[str, Any] = {"enable_lora": True, "max_lora_rank": rank}
    targets = options.get("target_modules")
    if isinstance(targets, (list, tuple)) and targets:
        arguments["lora_target_modules"] = sorted({str(name).rpartition(".")[2] for name in targets})
    return arguments
