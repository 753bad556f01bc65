"""An engine that differs from the policy on purpose, for correction.py: stale, disturbed or coarse weights."""

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
    """An engine that samples rollouts with stale, disturbed or coarse weights, and evaluations with the true ones."""

    def __init__(
        self, engine: Engine, *, staleness: int, noise: float, seed: int, num_bits: int | None = None
    ) -> None:
        """Wrap an engine at world size 1.

        Args:
            engine: The real one; it may serve many runs in turn.
            staleness: Steps that the weights lag behind, once there have been as many.
            noise: Each weight w becomes w (1 + noise e), with the same e ~ N(0, 1) for a whole run.
            seed: Seed of e.
            num_bits: Round the matrices of the blocks to integers of this many bits, with a scale per row, as an
                engine with such weights would; None rounds nothing.
        """
        self._num_bits = num_bits
        self._engine, self._staleness, self._noise, self._seed = engine, staleness, noise, seed
        self._history: deque[tuple[int, list[torch.Tensor]]] = deque(maxlen=staleness + 1)
        self._model: Any = None

    def update(self, model: Any, train_step: int, in_flight: InFlight = "refuse") -> UpdateReport:
        """Publish what the rollouts of `train_step` are to be sampled with."""
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
        """Sample with the true weights; only evaluations call this and `submit_many`."""
        self._engine.update(self._model, self._engine.version + 1)
        return self._engine.sample(prompts, sampling_params)

    def submit_many(self, requests: Any) -> Any:
        """Sample with the true weights."""
        self._engine.update(self._model, self._engine.version + 1)
        return self._engine.submit_many(requests)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @contextmanager
    def _weights(self, weights: list[torch.Tensor]) -> Iterator[None]:
        """Put other weights into the model for a block."""
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
    """Round the matrices of the blocks in place."""
    largest = 2 ** (num_bits - 1) - 1
    for (name, _), rows in zip(model.named_parameters(), _weights(model), strict=True):
        if ".layers." in name and rows.dim() == 2:
            scales = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / largest
            rows.copy_((rows / scales).round() * scales)


def _weights(model: Any) -> list[torch.Tensor]:
    """Return the parameters; one rank holds all of them."""
    reshard(model)
    parameters = (parameter.detach() for parameter in model.parameters())
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in parameters]
