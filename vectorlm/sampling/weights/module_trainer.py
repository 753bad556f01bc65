"""The contract of trainers, kept by a module and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vectorlm.ranks.topology import Topology
from vectorlm.sampling.weights.arena import MappedArenas
from vectorlm.sampling.weights.inspection import Inspection
from vectorlm.sampling.weights.lora_source import merged_source
from vectorlm.sampling.weights.model_tensors import adapter_prefixes
from vectorlm.sampling.weights.module_source import ModuleSource, manifest_of
from vectorlm.sampling.weights.plan import Layout, TensorSpec


class ModuleTrainer:
    """A `vectorlm.sampling.contract.Trainer` around any module, plain or sharded by FSDP2; the pattern for other
    trainers.

    A PEFT model's adapters are sent merged into its weights.

    >>> trainer = ModuleTrainer(model, optimizer, lambda model, batch: model(**batch).loss)  # doctest: +SKIP
    >>> for batch in batches:
    ...     trainer.step(batch)
    ...     engine.update(trainer, trainer.version)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[torch.nn.Module, Any], torch.Tensor],
        topology: Topology | None = None,
    ) -> None:
        """Begin at version 0.

        Args:
            model: The trained model.
            optimizer: Over its parameters.
            loss: Computes a rank's loss of a batch, a scalar; the gradient is the mean over ranks.
            topology: This rank's place; read from the environment when omitted.
        """
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._topology = Topology.from_environment() if topology is None else topology
        self._arenas = MappedArenas()
        self._version = 0

    @property
    def version(self) -> int:
        """Optimizer steps that were taken."""
        return self._version

    def manifest(self) -> Sequence[TensorSpec]:
        """List the module's parameters."""
        return manifest_of(self._model)

    def inspect(self, layout: Layout, with_checksums: bool, check_finite: bool) -> Inspection:
        """Look at the module's parameters before they are sent."""
        return self._source().inspect(layout, with_checksums, check_finite)

    def publish(self, layout: Layout, with_checksums: bool) -> Sequence[int]:
        """Write this rank's shards; no tensor is gathered."""
        return self._source().publish(layout, with_checksums)

    def step(self, batch: Any) -> Mapping[str, float]:
        """Take one step of the optimizer; return the mean ``loss`` over ranks."""
        loss = self._loss(self._model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._version += 1
        mean = loss.detach()
        if self._topology.world_size > 1:
            dist.all_reduce(mean, dist.ReduceOp.SUM)
        return {"loss": mean.item() / self._topology.world_size}

    def _source(self) -> ModuleSource:
        if adapter_prefixes(self._model):
            return merged_source(self._model, self._topology, self._arenas)
        return ModuleSource(self._model, self._topology, self._arenas)
