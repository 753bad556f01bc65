"""List the tensors of a model by their checkpoint names, without wrappers and adapters."""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vectorlm.errors import WeightMismatch

if TYPE_CHECKING:
    import torch


WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Parts that wrappers insert into parameter names; no checkpoint has them."""


def without_wrappers(name: str) -> str:
    """Return a parameter's name without the parts that wrappers insert."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def reshard(model: torch.nn.Module) -> None:
    """Shard parameters again that FSDP2 left whole, also those that it manages from a wrapper around `model`.

    FSDP2 keeps the root's parameters whole after a forward without backward; an update must always see the same shards.
    """
    _reshard(model.modules())


def _reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Run the hooks that prepare the modules for a checkpoint.

    FSDP2 registers its own at the modules with parameters; the module that `fully_shard` got may be outside.
    """
    for module in modules:
        for hook in list(module._state_dict_pre_hooks.values()):
            hook(module, "", False)


class Snapshot:
    """The submodules, parameters and buffers of a model at one time, their places in memory, and adapters in use.

    It keeps neither the model nor its tensors alive.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Take the snapshot; FSDP2's parameters are sharded again first."""
        modules = list(model.modules())
        _reshard(modules)
        self._modules = [weakref.ref(module) for module in modules]
        self._members = list(map(_members, modules))
        tensors: dict[int, torch.Tensor] = {}
        for module in modules:
            held = (*module._parameters.values(), *module._buffers.values())
            tensors.update((id(tensor), tensor) for tensor in held if tensor is not None)
        self._tensors = [weakref.ref(tensor) for tensor in tensors.values()]
        self._places = list(map(_place, tensors.values()))
        self._options = [
            (weakref.ref(module), _plain_values(module)) for module in modules if _has_adapters(module)
        ]

    def is_current(self) -> bool:
        """Whether nothing was replaced or moved since; FSDP2's parameters are sharded again first."""
        modules = [ref() for ref in self._modules]
        _reshard(module for module in modules if module is not None)
        tensors = [ref() for ref in self._tensors]
        # Live objects keep their identities, so equal identities are the same objects.
        return (
            id(None) not in {*map(id, modules), *map(id, tensors)}
            and list(map(_members, modules)) == self._members
            and list(map(_place, tensors)) == self._places
            and all(_plain_values(ref()) == options for ref, options in self._options)
        )


def _members(module: Any) -> list[int]:
    held = itertools.chain(module._modules.values(), module._parameters.values(), module._buffers.values())
    return list(map(id, held))


def _plain_values(module: Any) -> str:
    """Return the attributes of PEFT's layers that are plain data: active adapters, scaling, whether they are merged."""
    return repr([item for item in vars(module).items() if item[0] not in _of_module() and _is_plain(item[1])])


@functools.cache
def _of_module() -> frozenset[str]:
    """Return the attributes of every module, such as its hooks."""
    import torch

    return frozenset(vars(torch.nn.Module()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _has_adapters(module: Any) -> bool:
    return "base_layer" in module._modules or "original_module" in module._modules


def _place(tensor: Any) -> tuple[Any, ...]:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.data_ptr(), local.dtype, local.shape, local.stride()


def trainer_tensors(
    model: torch.nn.Module, quantized: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of `model`, resharded; tied ones appear once.

    Names are without the parts of wrappers. For a PEFT model these are the base model's tensors, with
    ``modules_to_save`` in place of the modules that they replace. Pass `quantized_layers` if they are known.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise WeightMismatch(
            "the model is wrapped by FSDP1, which is not supported. Use fully_shard (FSDP2)."
        )
    reshard(model)
    foreign = adapter_prefixes(model)
    tensors: dict[str, torch.Tensor] = {}
    seen = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in seen and not name.startswith(foreign):
            if not parameter.is_floating_point():
                raise WeightMismatch(
                    f"{name!r} has dtype {parameter.dtype}, but weights must have a floating dtype."
                )
            seen.add(id(parameter))
            tensors[checkpoint_name(name)] = parameter
    quantized = quantized_layers(model) if quantized is None else quantized
    packed = {name: layer.packed for name, layer in quantized.items()}
    return tensors | packed | persistent_buffers(model)


def quantized_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers with quantised weights, by the name of the weight."""
    return {
        checkpoint_name(f"{name}.weight"): module
        for name, module in model.named_modules()
        if "packed" in module._buffers and hasattr(module, "dequantize")
    }


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of `model` that are in its checkpoint, by their names there."""
    foreign = adapter_prefixes(model)
    return {
        checkpoint_name(f"{prefix}.{name}".removeprefix(".")): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
        and name not in module._non_persistent_buffers_set
        and not f"{prefix}.".startswith(foreign)
    }


def checkpoint_name(name: str) -> str:
    """Return the name of a parameter or module in the base model's checkpoint."""
    # DistributedDataParallel and PEFT wrap the whole model. No checkpoint's names begin like this.
    name = without_wrappers(name).removeprefix("module.").removeprefix("base_model.model.")
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)", "", name)


def adapter_prefixes(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of parameters that are not part of the base model as it computes now."""
    prefixes = []
    for name, module in model.named_modules():
        owned: Any = module
        if {"lora_A", "base_layer"} <= module._modules.keys():
            prefixes.append(f"{name}.lora_")
        elif {"original_module", "modules_to_save"} <= module._modules.keys():
            active = [] if owned.disable_adapters else owned.active_adapters
            unused = [adapter for adapter in owned.modules_to_save if adapter not in active]
            prefixes += [f"{name}.modules_to_save.{adapter}." for adapter in unused]
            if len(unused) < len(owned.modules_to_save):
                prefixes.append(f"{name}.original_module.")
    return tuple(prefixes)
