"""Find the low-rank factors that PEFT added to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vectorlm.errors import ConfigError, WeightMismatch
from vectorlm.sampling.weights.lora_options import refused_options
from vectorlm.sampling.weights.model_tensors import checkpoint_name

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoraFactors:
    """One adapter of one layer: it adds ``scaling * B @ A`` to the layer's weight.

    Source: Hu et al. 2021, arXiv 2106.09685, eq. 3; the magnitude is Liu et al. 2024, arXiv 2402.09353, eq. 5.
    """

    layer: str
    """The layer's name in the base model."""
    a: torch.Tensor
    """[r, in], float; for an embedding [r, vocabulary]."""
    b: torch.Tensor
    """[out, r], float; for an embedding [dimensions, r]."""
    scaling: float
    """alpha / r, or alpha / sqrt(r)."""
    is_transposed: bool
    """Whether the base weight is [in, out]: embeddings and GPT-2's layers."""
    magnitude: torch.Tensor | None
    """DoRA's length of each row of the weight, [out]; None for plain LoRA."""


def lora_factors(model: torch.nn.Module) -> list[LoraFactors]:
    """List the active adapters of `model`, layer by layer; none for a model without LoRA."""
    found = []
    for module_name, layer in model.named_modules():
        if not is_lora_layer(layer) or layer.disable_adapters:
            continue
        name = checkpoint_name(module_name)
        if layer.merged:
            raise WeightMismatch(
                f"the adapters of {name!r} are merged into its base weight: call unmerge_adapter() before the update."
            )
        for adapter in layer.active_adapters:
            variant = type(layer.lora_variant.get(adapter)).__name__
            if variant not in ("NoneType", "DoraLinearVariant"):
                raise ConfigError(
                    f"the adapter of {name!r} is a {variant}, which is neither LoRA nor DoRA on a linear layer. Leave "
                    "that layer out of target_modules, or use plain LoRA."
                )
            scaling = float(layer.scaling.get(adapter, 0.0))
            if adapter in layer.lora_A:
                magnitude = layer.lora_magnitude_vector[adapter].weight if variant != "NoneType" else None
                a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
                found.append(LoraFactors(name, a, b, scaling, bool(layer.fan_in_fan_out), magnitude))
            elif adapter in layer.lora_embedding_A:
                a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
                found.append(LoraFactors(name, a, b, scaling, True, None))
    return found


def is_lora_layer(module: Any) -> bool:
    """Whether `module` is a layer that PEFT put LoRA on; recognised by its children, as peft need not be installed."""
    # Asking a module for an attribute that it lacks costs a microsecond, and a model has thousands.
    return {"lora_A", "lora_embedding_A", "base_layer"} <= module._modules.keys()


def require_expressible(model: torch.nn.Module, lora_mode: str) -> None:
    """Raise `ConfigError` for adapters that the engine could not follow in this mode, `adapter` or `merged`."""
    layers: list[Any] = [module for module in model.modules() if is_lora_layer(module)]
    if not layers:
        return
    owner: Any = next((module for module in model.modules() if hasattr(module, "peft_config")), None)
    for adapter in sorted({adapter for layer in layers for adapter in layer.active_adapters}):
        options = owner.peft_config[adapter].to_dict() if owner is not None else {}
        for option, value, rule, fix in refused_options(options, lora_mode):
            raise ConfigError(f"the model's LoRA option {option}={value!r} {rule}. {fix}")
