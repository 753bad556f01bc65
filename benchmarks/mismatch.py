"""An engine whose weights differ from the policy's on purpose (stale, noisy or rounded), for correction.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from vectorlm.sampling.weights.model_tensors import reshard

if TYPE_CHECKING:
    from vectorlm.types import Completion, Engine, InFlight, Prompt, UpdateReport


class MismatchedEngine:
    """An engine that samples rollouts with stale, noisy or rounded weights, and evaluations with the policy's."""

    def __init__(
        self, engine: Engine, *, staleness: int, noise: float, seed: int, num_bits: int | None = None
    ) -> None:
        """Wrap an engine at world size 1.

        Args:
            engine: The wrapped engine; several runs may use it, one after the other.
            staleness: Steps that the weights lag behind, once the run has made that many.
            noise: Every weight w becomes w (1 + noise e); its e ~ N(0, 1) is constant during a run.
            seed: Seed of e.
            num_bits: Bits of the integers to which the matrices of the blocks are rounded, with a scale per row; None
                rounds nothing.
        """
        self._num_bits = num_bits
        self._engine, self._staleness, self._noise, self._seed = engine, staleness, noise, seed
        self._history: deque[tuple[int, list[torch.Tensor]]] = deque(maxlen=staleness + 1)
        self._model: Any = None

    def update(self, model: Any, train_step: int, in_flight: InFlight = "refuse") -> UpdateReport:
        """Send the engine the weights that sample the rollouts of `train_step`."""
        self._model = model
        if not self._history or self._history[-1][0] != train_step:
            self._history.append((train_step, [local.clone() for local in _weights(model)]))
        generator = torch.Generator().manual_seed(self._seed)
        with self._weights(self._history[0][1]):
            for local in _weights(model) if self._noise else ():
                local *= 1 + self._noise * torch.randn(local.shape, generator=generator)
            if self._num_bits is not None:
                _round(model, self._num_bits)
            return self._engine.update(model, self._engine.version + 1, in_flight)

    def sample(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[list[Completion]]:
        """Sample with the policy's weights; only evaluations call this and `submit_many`."""
        self._engine.update(self._model, self._engine.version + 1)
        return self._engine.sample(prompts, sampling_params)

    def submit_many(self, requests: Any) -> Any:
        """Submit requests that are sampled with the policy's weights."""
        self._engine.update(self._model, self._engine.version + 1)
        return self._engine.submit_many(requests)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @contextmanager
    def _weights(self, weights: list[torch.Tensor]) -> Iterator[None]:
        """Put `weights` into the model inside a `with` block."""
        true = [local.clone() for local in _weights(self._model)]
        try:
            _copy(weights, self._model)
            yield
        finally:
            _copy(true, self._model)


@torch.no_grad()
def _copy(weights: list[torch.Tensor], model: Any) -> None:
    for local, value in zip(_weights(model), weights, strict=True):
        local.copy_(value)


def _round(model: Any, num_bits: int) -> None:
    """Round the matrices of the transformer blocks in place."""
    largest = 2 ** (num_bits - 1) - 1
    for (name, _), rows in zip(model.named_parameters(), _weights(model), strict=True):
        if ".layers." in name and rows.dim() == 2:
            scales = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / largest
            rows.copy_((rows / scales).round() * scales)


def _weights(model: Any) -> list[torch.Tensor]:
    """Return the local tensors of the parameters, which are whole at world size 1."""
    reshard(model)
    parameters = (parameter.detach() for parameter in model.parameters())
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in parameters]
