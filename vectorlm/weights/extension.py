"""The calls that reach a receiver inside vLLM's worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vectorlm.weights.plan import Layout, TensorSpec
from vectorlm.weights.receive import Receiver


class WeightExtension:
    """Mixed into vLLM's worker class (``worker_extension_cls``); reached by ``collective_rpc``.

    The prefix keeps the names apart from the worker's own. Arguments and results are plain data.
    """

    model_runner: Any

    def vectorlm_prepare(self, kind: str) -> str:
        """Make the receiver for the loaded model; return the kind it chose."""
        model = self.model_runner.get_model()
        chosen = choose_receiver(kind, model)
        self._vectorlm_receiver = Receiver(model, chosen)
        return chosen

    def vectorlm_connect(self, manifest: Sequence[TensorSpec], arena_path: str | None) -> Layout:
        """Match the trainer's tensors with the model's and return the arena's layout."""
        return self._vectorlm_receiver.connect(manifest, arena_path)

    def vectorlm_load(self, version: int, expected: Sequence[int] | None) -> float:
        """Take the arena's weights over; return the seconds it took."""
        return self._vectorlm_receiver.load(version, expected)


PACKED_FROM_PARAMETERS = 4_000_000
"""Below this size a decode step gains nothing from packed weights, and a swap pays for packing them."""


def choose_receiver(kind: str, model: Any) -> str:
    """Resolve `auto`: `packed` for models on CPU of some size, `live` otherwise."""
    parameters = list(model.parameters())
    on_host = all(parameter.device.type == "cpu" for parameter in parameters)
    if kind == "auto":
        large = sum(parameter.numel() for parameter in parameters) >= PACKED_FROM_PARAMETERS
        return "packed" if on_host and large else "live"
    if kind == "packed" and not on_host:
        raise ValueError("receiver='packed' is for models on CPU; on CUDA there is only 'live'.")
    return kind
