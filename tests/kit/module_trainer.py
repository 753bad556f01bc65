"""A trainer for a module and its optimizer, as in docs/contracts.md; it also supports adapters."""

import torch.distributed as dist

from vectorlm.ranks.topology import Topology
from vectorlm.sampling.weights.arena import MappedArenas
from vectorlm.sampling.weights.lora_source import merged_source
from vectorlm.sampling.weights.model_tensors import adapter_prefixes
from vectorlm.sampling.weights.module_source import ModuleSource


class ModuleTrainer:
    version = 0

    def __init__(self, model, optimizer, loss, topology=None):
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._topology = Topology.from_environment() if topology is None else topology
        self._arenas = MappedArenas()

    def manifest(self):
        return self._source().manifest()

    def inspect(self, layout, with_checksums, check_finite):
        return self._source().inspect(layout, with_checksums, check_finite)

    def publish(self, layout, with_checksums):
        return self._source().publish(layout, with_checksums)

    def step(self, batch):
        loss = self._loss(self._model, batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1
        mean = loss.detach()
        if self._topology.world_size > 1:
            dist.all_reduce(mean, dist.ReduceOp.SUM)
        return {"loss": mean.item() / self._topology.world_size}

    def _source(self):
        make = merged_source if adapter_prefixes(self._model) else ModuleSource
        return make(self._model, self._topology, self._arenas)
