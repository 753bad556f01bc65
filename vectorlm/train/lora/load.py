"""Low-rank adapters on a model with frozen weights: PEFT adds them, and they are found again here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vectorlm.errors import ConfigError
from vectorlm.sampling.weights.lora_factors import is_lora_layer
from vectorlm.sampling.weights.lora_options import SCORES, WRITES

if TYPE_CHECKING:
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
