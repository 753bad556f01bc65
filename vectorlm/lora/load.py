"""Low-rank adapters on a model with frozen weights: PEFT adds them, and they are found again here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vectorlm.errors import ConfigError, WeightMismatch
from vectorlm.lora.options import SCORES, WRITES, refused_options
from vectorlm.weights.plan import checkpoint_name

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel


def add_lora(model: PreTrainedModel, lora_config: Mapping[str, Any]) -> nn.Module:
    """Wrap `model` so that only its low-rank adapters are trained: W x + (alpha / r) B A x.

    Source: Hu et al. 2021, arXiv 2106.09685, eq. 3. `lora_config` holds arguments of ``peft.LoraConfig``;
    ``task_type`` defaults to the model's, and a reward model's head is trained whole. Call it before sharding.

    Raises:
        ConfigError: An argument is unknown or does not fit the model.
    """
    from peft import LoraConfig, get_peft_model

    try:
        kind = SCORES if type(model).__name__.endswith("ForSequenceClassification") else WRITES
        return get_peft_model(model, LoraConfig(**{"task_type": kind, **lora_config}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"train_parameters.lora_peft_config={dict(lora_config)} cannot be used: {error} "
            "It takes the arguments of peft.LoraConfig."
        ) from error


def unmatched_names(model: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in these options of a model's adapters that no layer has, as PEFT compares them."""
    from peft.utils.other import get_pattern_key

    modules = list(model.get_base_model().named_modules())
    adapted = [name for name, module in modules if is_lora_layer(module)]
    tests: dict[str, Callable[[Any], bool]] = {
        name: lambda given: any(f".{each}".endswith(f".{given}") for each, _ in modules)
        for name in ("target_modules", "exclude_modules", "modules_to_save")
    }
    for name in ("rank_pattern", "alpha_pattern"):
        tests[name] = lambda given: any(
            each == given or get_pattern_key([given], each) != each for each in adapted
        )
    tests["layers_to_transform"] = lambda given: any(f".{given}." in each for each in adapted)
    tests["layers_pattern"] = lambda given: any(re.search(rf"(^|\.){given}\.\d+\.", each) for each in adapted)
    for option, has in tests.items():
        names: Any = options.get(option) or ()
        is_alone = isinstance(names, str | int)
        if is_alone and option.endswith("_modules"):
            # An expression for whole names. PEFT refuses one that targets nothing, and writes a list in a short form.
            if option == "exclude_modules" and not any(re.fullmatch(names, each) for each, _ in modules):
                yield f"{option} {names!r}"
            continue
        if option == "layers_to_transform" and options.get(option) == 0:
            names, is_alone = 0, True
        for given in (names,) if is_alone else names:
            if not has(given):
                yield f"{option} {given!r}"


def is_still(model: Any) -> bool:
    """Whether no trained weight of a model with adapters can get a gradient other than 0."""
    layers = [module for module in model.modules() if is_lora_layer(module)]
    still = {
        id(parameter)
        for layer in layers
        if not any(layer.scaling.values())
        or all(getattr(each, "p", 0) == 1 for each in layer.lora_dropout.values())
        for parameter in layer.parameters()
    }
    return all(id(each) in still for each in model.parameters() if each.requires_grad)


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
