"""Send a PEFT model: its base merged with its adapters, or the base once and then only the adapters."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vectorlm.errors import ConfigError, WeightMismatch
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.contract import WeightSet
from vectorlm.sampling.weights.arena import MappedArenas
from vectorlm.sampling.weights.lora_factors import LoraFactors, lora_factors, require_expressible
from vectorlm.sampling.weights.model_tensors import (
    adapter_prefixes,
    checkpoint_name,
    reshard,
    trainer_tensors,
)
from vectorlm.sampling.weights.module_source import Change, HeldBox, ModuleSource, held_boxes, then


def lora_weight_sets(
    model: torch.nn.Module, topology: Topology, arenas: MappedArenas, lora_mode: str
) -> list[WeightSet]:
    """Return the weight sets of a PEFT model for an update; called on all ranks.

    Mode `merged` has one set of merged weights. Mode `adapter` has the base, which is sent again only after it was
    written to, and the active adapters.

    Raises:
        ConfigError: The engine does not support the model's adapters in this mode.
        WeightMismatch: The adapters are merged into their weights, or have another sharding.
    """
    if lora_mode == "merged":
        return [WeightSet("base", merged_source(model, topology, arenas))]
    adapter = adapter_source(model, topology, arenas)
    sets = [WeightSet("base", ModuleSource(model, topology, arenas), Fingerprint(model))]
    return [*sets, WeightSet("adapter", adapter)] if adapter.manifest() else sets


class Fingerprint:
    """A fingerprint that equals an earlier one if the base model was neither replaced nor written to since.

    It reads no weights: every tensor counts its in-place operations. Trained tensors always count as changed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        tensors = list(trainer_tensors(model).values())
        # Compares the objects too, because a new model may reuse the addresses of an old one.
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._states = [_state(tensor) for tensor in tensors]
        self.is_trained = any(tensor.requires_grad for tensor in tensors)

    def again(self) -> Fingerprint:
        """Return the fingerprint of the same tensors as they are now; None of them may have been replaced."""
        later = copy.copy(self)
        tensors: list[Any] = [ref() for ref in self._tensors]
        later._states = [_state(tensor) for tensor in tensors]
        later.is_trained = any(tensor.requires_grad for tensor in tensors)
        return later

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Fingerprint)
            and not (self.is_trained or other.is_trained)
            and self._states == other._states
            and all(
                mine() is theirs() is not None
                for mine, theirs in zip(self._tensors, other._tensors, strict=True)
            )
        )


def _state(tensor: torch.Tensor) -> tuple[int, ...]:
    local = getattr(tensor, "_local_tensor", tensor)
    # Not the address: an export moves a shard's memory, but keeps the storage object.
    place = local.untyped_storage()._cdata, int(local.storage_offset())
    # DTensor and shard count their own operations only.
    return *place, tensor._version, local._version


def merged_source(
    model: torch.nn.Module, topology: Topology, arenas: MappedArenas | None = None
) -> ModuleSource:
    """Send the model's parameters with its adapters merged into copies of them; the model does not change.

    Every rank merges its own rows. Only the small factors are gathered.
    """
    require_expressible(model, "merged")
    adapters = lora_factors(model)
    shared = _shared_weights(model) if adapters else set()
    tensors, changes = trainer_tensors(model), dict[str, Change]()
    for factors in adapters:
        name = factors.weight
        if name in shared:
            raise ConfigError(
                f"the adapter of {factors.layer!r} cannot be merged, because other layers use the same weight without "
                "it. Leave that layer out of target_modules, or use lora_mode='adapter' on an engine built with "
                "enable_lora=True."
            )
        earlier = changes.get(name)
        if factors.magnitude is not None and earlier is not None:
            raise ConfigError(
                f"the layer {factors.layer!r} has DoRA and a second active adapter, which cannot be merged together. "
                "Activate one of them with set_adapter()."
            )
        change = _merge(factors, tensors[name], topology)
        changes[name] = change if earlier is None else then(earlier, change)
    return ModuleSource(model, topology, arenas, changes=changes, beside=_named_factors(adapters))


def adapter_source(
    model: torch.nn.Module, topology: Topology, arenas: MappedArenas | None = None
) -> ModuleSource:
    """Send only the factors of the adapters. B is multiplied by the scaling, and the engine's own scaling is 1."""
    require_expressible(model, "adapter")
    reshard(model)
    tensors, changes = dict[str, torch.Tensor](), dict[str, Change]()
    scalings: dict[str, torch.Tensor] = {}
    for factors in lora_factors(model):
        if factors.magnitude is not None or factors.num_experts or f"{factors.layer}.lora_A" in tensors:
            what = "DoRA" if factors.magnitude is not None else "several active adapters"
            what = "adapters of experts" if factors.num_experts else what
            raise ConfigError(
                f"the layer {factors.layer!r} has {what}, which vLLM's LoRA layers cannot compute. Use "
                "lora_mode='merged', which publishes merged weights."
            )
        tensors[f"{factors.layer}.lora_A"] = factors.a
        tensors[f"{factors.layer}.lora_B"] = factors.b
        changes[f"{factors.layer}.lora_B"] = _scale_rows(factors.scaling)
        # Not sent, but a change of the scaling changes what is sent.
        scalings[f"{factors.layer}.scaling"] = torch.tensor([factors.scaling])
    return ModuleSource(model, topology, arenas, tensors=tensors, changes=changes, beside=scalings)


def _scale_rows(scaling: float) -> Change:
    return lambda rows: rows.float() * scaling


def _merge(factors: LoraFactors, weight: torch.Tensor, topology: Topology) -> Change:
    """Return the merge of this rank's rows of a weight with the same rows of B A, or of its transpose."""
    if factors.is_transposed and factors.magnitude is not None:
        raise ConfigError(
            f"the DoRA adapter of {factors.layer!r} cannot be merged, because its weight is transposed. Use plain LoRA."
        )
    own, *others = held_boxes(weight, topology)
    if others:
        raise ConfigError(
            f"the adapter of {factors.layer!r} cannot be merged, because ranks split its weight in several parts. "
            "Leave that layer out of target_modules, or use train_parameters.tensor_parallel=1."
        )
    rows, *_, columns = (
        slice(start, start + length) for start, length in zip(own.sent_place, own.rows.shape, strict=True)
    )
    if factors.num_experts:
        b = _whole(factors.b)
        left, right = (
            b.reshape(len(b), -1, factors.num_experts).permute(2, 0, 1)[rows],
            _whole(factors.a).reshape(factors.num_experts, -1, factors.a.shape[1])[rows],
        )
        if factors.is_transposed:
            left, right = right.transpose(1, 2), left.transpose(1, 2)
        return merge_into(left, right, factors.scaling)
    if factors.is_transposed:
        left = _whole(factors.a).t()[rows]
        return merge_into(left, _whole(factors.b).t()[:, columns], factors.scaling)
    left = _same_rows(factors.layer, factors.b, topology, own)
    right = _whole(factors.a)[:, columns]
    magnitude = None
    if factors.magnitude is not None:
        magnitude = _same_rows(factors.layer, factors.magnitude, topology, own)
    return merge_into(left, right, factors.scaling, magnitude)


def merge_into(
    left: torch.Tensor, right: torch.Tensor, scaling: float, magnitude: torch.Tensor | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    r"""Return the function that merges an adapter into rows of W, in float32.

    It maps :math:`W` to :math:`W + \Delta` with :math:`\Delta = s L R`, or with DoRA to
    :math:`m (W + \Delta) / \|W + \Delta\|`.

    Source: Hu et al. 2021, arXiv 2106.09685, eq. 3; Liu et al. 2024, arXiv 2402.09353, eq. 5, with the norm over the
    columns of each row, as a weight of shape [out, in] has its outputs in rows.

    Args:
        left: L, [rows, r]: the rows that the rank sends; for experts [experts, rows, r].
        right: R, [r, columns], whole; for experts [experts, r, columns].
        scaling: s.
        magnitude: DoRA's m, float [rows].
    """

    def merged(rows: torch.Tensor) -> torch.Tensor:
        total = rows.float() + scaling * (left.detach().float() @ right.detach().float())
        if magnitude is None:
            return total
        return total * (magnitude.detach().float() / torch.linalg.norm(total, dim=1))[:, None]

    return merged


def _named_factors(adapters: Sequence[LoraFactors]) -> dict[str, torch.Tensor]:
    """Return the tensors that the merge reads, by names for error messages."""
    found: dict[str, torch.Tensor] = {}
    for index, factors in enumerate(adapters):
        parts = {
            "lora_A": factors.a,
            "lora_B": factors.b,
            "lora_magnitude": factors.magnitude,
            "scaling": torch.tensor([factors.scaling]),
        }
        found |= {
            f"{factors.layer}.{part} (adapter {index})": x for part, x in parts.items() if x is not None
        }
    return found


def _whole(factor: torch.Tensor) -> torch.Tensor:
    factor = factor.detach()
    return factor.full_tensor() if isinstance(factor, DTensor) else factor


def _same_rows(layer: str, factor: torch.Tensor, topology: Topology, weight: HeldBox) -> torch.Tensor:
    """Return the rows of `factor` that belong to this rank's rows of the weight."""
    own = held_boxes(factor, topology)[0]
    start, num = weight.first_row - own.place[0], len(weight.rows)
    if num and not 0 <= start <= len(own.held) - num:
        raise WeightMismatch(
            f"the adapter of {layer!r} and its weight have different shards (this rank has rows {own.place[0]} to "
            f"{own.place[0] + len(own.held)} of the adapter and {weight.first_row} to {weight.first_row + num} of the "
            "weight). Shard both with fully_shard over the same ranks."
        )
    return own.held[start : start + num] if num else own.held[:0]


def _shared_weights(model: torch.nn.Module) -> set[str]:
    """Name the tensors that several layers share."""
    names: dict[int, set[str]] = {}
    foreign = adapter_prefixes(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.startswith(foreign):
            names.setdefault(id(parameter), set()).add(checkpoint_name(name))
    return {name for together in names.values() if len(together) > 1 for name in together}
