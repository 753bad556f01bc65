"""The adapters that a run's engine has besides the policy's: the reference, and older policies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vectorlm.rl.settings import KeptAdapters
from vectorlm.sampling.engine import SamplingEngine
from vectorlm.sampling.weights.model_tensors import reshard
from vectorlm.train.lora import start_alone
from vectorlm.types import POLICY, InFlight, TrainedModel

REFERENCE = "reference"
"""Name of the adapter of the policy before training."""


OLDER = f"{POLICY}@"
"""Prefix of the names of older policies; the step follows."""


class OtherAdapters:
    """Sends the reference and older policies to the engine; all calls are collective.

    It keeps this rank's shards of the older policies, for checkpoints and for an engine whose weights have slept.
    """

    def __init__(
        self,
        engine: SamplingEngine,
        model: nn.Module,
        settings: KeptAdapters | None = None,
        in_flight: InFlight = "refuse",
    ) -> None:
        """Take the policy, a model with LoRA adapters; without `settings` no older policies are kept."""
        self._engine, self._model, self._in_flight = engine, model, in_flight
        self._settings = settings
        self._kept: dict[int, nn.ParameterList] = {}

    def send(self, step: int) -> None:
        """Send the engine the adapters that it lacks, before the update to `step`, whose weights the model has."""
        kept = {f"{OLDER}{of_step}": of_step for of_step in self._keep(step)}
        for name in [*self._engine.adapters]:
            if name.startswith(OLDER) and name not in kept:
                self._engine.remove_adapter(name)
        if REFERENCE not in self._engine.adapters:
            reshard(self._model)
            with start_alone(self._model):
                self._engine.update(self._model, 0, self._in_flight, name=REFERENCE)
        for name, of_step in kept.items():
            if name not in self._engine.adapters:
                with self._weights_of(of_step, is_current=of_step == step):
                    self._engine.update(self._model, of_step, self._in_flight, name=name)

    def trained(self, step: int) -> dict[str, TrainedModel]:
        """Return the older policies for the checkpoint of `step`, which writes them or reads into them."""
        return {f"{OLDER}{kept}": TrainedModel(self._kept[kept], None) for kept in self._keep(step)}

    def _keep(self, step: int) -> list[int]:
        """Copy the model's weights if the policy after `step` must be kept; return the steps of all kept policies."""
        if self._settings is None:
            return []
        steps = self._settings.kept_at(step)
        if missing := [kept for kept in steps if kept not in self._kept]:
            reshard(self._model)
            for kept in missing:
                copies = [tensor.detach().clone() for tensor in self._trained()]
                self._kept[kept] = nn.ParameterList(
                    nn.Parameter(copy, requires_grad=False) for copy in copies
                )
        self._kept = {kept: self._kept[kept] for kept in steps}
        return steps

    def _trained(self) -> list[nn.Parameter]:
        return [tensor for tensor in self._model.parameters() if tensor.requires_grad]

    @contextmanager
    def _weights_of(self, step: int, is_current: bool) -> Iterator[None]:
        """Give the model the weights after `step` for a block."""
        if is_current:
            yield
            return
        reshard(self._model)
        tensors = self._trained()
        before = [tensor.detach().clone() for tensor in tensors]
        try:
            _copy(self._kept[step], tensors)
            yield
        finally:
            _copy(before, tensors)


@torch.no_grad()
def _copy(sources: nn.ParameterList | list[torch.Tensor], targets: list[nn.Parameter]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
