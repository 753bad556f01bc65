"""An engine that is deliberately not the policy, for correction.py: stale weights, noise in them."""

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
    """Samples rollouts with weights that are `staleness` steps old and disturbed, and exams with the true ones.

    An exam asks without parameters of its own, so that is how it is told from a rollout.
    """

    def __init__(self, engine: Engine, *, staleness: int, noise: float, seed: int) -> None:
        """Wrap an engine at world size 1.

        Args:
            engine: The real one; it may serve many runs in turn.
            staleness: Steps that the weights lag behind, once there have been as many.
            noise: Each weight w becomes w (1 + noise e), with the same e ~ N(0, 1) for a whole run.
            seed: What e is drawn from.
        """
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
            return self._engine.update(model, self._engine.version + 1, in_flight)

    def sample(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[list[Completion]]:
        """Sample; without parameters, with the true weights."""
        if sampling_params is None:
            self._engine.update(self._model, self._engine.version + 1)
        return self._engine.sample(prompts, sampling_params)

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


def _weights(model: Any) -> list[torch.Tensor]:
    """Return the parameters themselves; one rank holds the whole of each."""
    reshard(model)
    held = (parameter.detach() for parameter in model.parameters())
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]
