"""A model's weights, whole, copied into another model of the same kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from vectorlm.errors import WeightMismatch
from vectorlm.weights.adapted import lora_factors
from vectorlm.weights.plan import TensorSpec, trainer_tensors


def require_same(sent: Sequence[TensorSpec], held: Sequence[TensorSpec]) -> None:
    """Check that two models have the same parameters.

    Raises:
        WeightMismatch: Names or shapes differ; the text lists them.
    """
    theirs, ours = ({spec.name: spec.shape for spec in specs} for specs in (sent, held))
    missing = sorted(ours.keys() - theirs.keys())
    surplus = sorted(theirs.keys() - ours.keys())
    reshaped = [
        f"{name} {theirs[name]} for {ours[name]}"
        for name in ours
        if theirs.get(name, ours[name]) != ours[name]
    ]
    if adapters := [name for name in surplus if ".lora_" in name]:
        raise WeightMismatch(
            f"the model has adapters ({adapters[0]} …), which this engine cannot take: merge them into their weights "
            "first, or use SamplingEngine."
        )
    if missing or surplus or reshaped:
        raise WeightMismatch(
            f"the trainer sends {len(theirs)} tensors, the engine holds {len(ours)}; missing: {missing}; "
            f"unexpected: {surplus}; other shapes: {reshaped}."
        )


def require_no_adapters(model: torch.nn.Module) -> None:
    """Check that the parameters of `model` are all that it computes with: adapters would be left out in silence.

    Raises:
        WeightMismatch: The model has active adapters.
    """
    if factors := lora_factors(model):
        raise WeightMismatch(
            f"the model has adapters ({factors[0].layer!r} for one), which this engine cannot take: merge them into "
            "their weights first (merge_and_unload), or use SamplingEngine."
        )


@torch.no_grad()
def copy_whole(model: torch.nn.Module, into: Mapping[str, torch.Tensor] | None) -> int:
    """Copy every parameter of `model` into the tensor of its name, one at a time; called on all ranks.

    Sharded parameters are gathered, which all ranks take part in; no rank ever holds more than one whole tensor
    besides `into`. What is in `into` afterwards is the trainer's value, cast: there is nothing left to verify.

    Args:
        model: The trained model, plain or FSDP2.
        into: The tensors to fill, on the rank that has them; None on the others.

    Returns:
        Bytes that were replaced.
    """
    num_bytes = 0
    for name, parameter in trainer_tensors(model).items():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if into is not None:
            into[name].copy_(whole)
            num_bytes += into[name].nbytes
    return num_bytes
