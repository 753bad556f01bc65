"""What a PEFT model publishes: its base merged with its adapters, or the adapters alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from vectorlm.errors import ConfigError, WeightMismatch
from vectorlm.ranks.topology import Topology
from vectorlm.weights.adapted import LoraFactors, lora_factors, require_expressible
from vectorlm.weights.merge import LowRank, merge_into, scale_rows
from vectorlm.weights.plan import adapter_prefixes, checkpoint_name, reshard
from vectorlm.weights.publish import owned_rows
from vectorlm.weights.source import Change, Source, base_sources


def merged_sources(model: torch.nn.Module, topology: Topology) -> Mapping[str, Source]:
    """Publish the model's parameters with its adapters merged into copies of them; the model is not touched.

    Each rank merges the rows that it holds; only the small factors that it needs whole are gathered.

    Raises:
        ConfigError: An adapter cannot be merged into the weight of its layer.
        WeightMismatch: An adapter is sharded otherwise than its layer.
    """
    require_expressible(model, "merged")
    sources = dict(base_sources(model, topology))
    adapters = lora_factors(model)
    shared = _shared_weights(model) if adapters else set()
    for factors in adapters:
        name = f"{factors.layer}.weight"
        if name in shared:
            raise ConfigError(
                f"the adapter of {factors.layer!r} cannot be merged: other layers use the same weight without it. "
                "Leave that layer out of target_modules, or use lora_mode='adapter' on an engine built with "
                "enable_lora=True."
            )
        tensor, earlier = sources[name].tensor, sources[name].change
        if factors.magnitude is not None and earlier is not None:
            raise ConfigError(
                f"the layer {factors.layer!r} has DoRA and another active adapter, whose merged weight is not defined. "
                "Activate one of them with set_adapter()."
            )
        sources[name] = Source(tensor, _then(earlier, _merge(factors, tensor, topology)))
    return sources


def adapter_sources(model: torch.nn.Module, topology: Topology) -> Mapping[str, Source]:
    """Publish the factors of the adapters alone, B with its scaling, so that the engine's own scaling is 1.

    Raises:
        ConfigError: An adapter is more than LoRA, or a layer has several that are active.
    """
    require_expressible(model, "adapter")
    reshard(model)
    sources: dict[str, Source] = {}
    for factors in lora_factors(model):
        if factors.magnitude is not None or f"{factors.layer}.lora_A" in sources:
            what = "DoRA" if factors.magnitude is not None else "several active adapters"
            raise ConfigError(
                f"the layer {factors.layer!r} has {what}, which vLLM's LoRA layers cannot compute. Use "
                "lora_mode='merged', which publishes merged weights."
            )
        sources[f"{factors.layer}.lora_A"] = Source(factors.a)
        sources[f"{factors.layer}.lora_B"] = Source(factors.b, scale_rows(factors.scaling))
    return sources


def _merge(factors: LoraFactors, weight: torch.Tensor, topology: Topology) -> Change:
    """Bring the factors into the shape of this rank's rows of the weight: rows of `left` times all of `right`."""
    if factors.is_transposed and factors.magnitude is not None:
        raise ConfigError(
            f"the DoRA adapter of {factors.layer!r} cannot be merged: its weight is stored transposed. Use plain LoRA."
        )
    rows, first_row = owned_rows(weight, topology)
    if factors.is_transposed:
        left = _whole(factors.a).t()[first_row : first_row + len(rows)]
        return merge_into(LowRank(left, _whole(factors.b).t(), factors.scaling))
    left = _same_rows(factors.layer, factors.b, topology, first_row, len(rows))
    right = _whole(factors.a)
    magnitude = None
    if factors.magnitude is not None:
        magnitude = _same_rows(factors.layer, factors.magnitude, topology, first_row, len(rows))
    return merge_into(LowRank(left, right, factors.scaling), magnitude)


def _whole(factor: torch.Tensor) -> torch.Tensor:
    factor = factor.detach()
    return factor.full_tensor() if isinstance(factor, DTensor) else factor


def _same_rows(
    layer: str, factor: torch.Tensor, topology: Topology, first_row: int, num_rows: int
) -> torch.Tensor:
    """Return the rows of `factor` that this rank publishes, which must be those of its weight."""
    rows, first = owned_rows(factor, topology)
    if (first, len(rows)) != (first_row, num_rows):
        raise WeightMismatch(
            f"the adapter of {layer!r} is sharded otherwise than its weight (this rank holds rows {first} to "
            f"{first + len(rows)} of the one and {first_row} to {first_row + num_rows} of the other): shard both "
            "with fully_shard over the same ranks."
        )
    return rows


def _then(first: Change | None, second: Change) -> Change:
    return second if first is None else lambda rows: second(first(rows))


def _shared_weights(model: torch.nn.Module) -> set[str]:
    """Name the tensors that several layers use."""
    names: dict[int, set[str]] = {}
    foreign = adapter_prefixes(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.startswith(foreign):
            names.setdefault(id(parameter), set()).add(checkpoint_name(name))
    return {name for together in names.values() if len(together) > 1 for name in together}
