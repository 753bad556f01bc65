"""A tensor that a rank publishes, and what becomes of it on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vectorlm.ranks.topology import Topology
from vectorlm.weights.plan import TensorSpec, trainer_tensors

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Source:
    """One tensor of the trainer, and what becomes of a rank's rows on their way to the engine."""

    tensor: torch.Tensor
    """Plain, or a DTensor; its full shape is that of the slot."""
    change: Change | None = None
    """Makes the rows to publish from the rows that this rank owns; None publishes them as they are."""


SourcesOf = Callable[[torch.nn.Module, Topology], Mapping[str, Source]]
"""What a model publishes, by the names of the slots; a collective where it has to gather something."""


def base_sources(model: torch.nn.Module, topology: Topology) -> Mapping[str, Source]:
    """Publish the model's own parameters; of a PEFT model, those of the base model."""
    return {name: Source(tensor) for name, tensor in trainer_tensors(model).items()}


def manifest_from(sources: Mapping[str, Source]) -> tuple[TensorSpec, ...]:
    """List the names and full shapes of `sources`."""
    return tuple(TensorSpec(name, tuple(source.tensor.shape)) for name, source in sources.items())
