"""The calls that reach a receiver inside vLLM's worker."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from vectorlm.errors import EngineError, VectorLMError
from vectorlm.receiver import packs_by_itself
from vectorlm.weights.adapter_receive import AdapterReceiver
from vectorlm.weights.plan import Layout, TensorSpec
from vectorlm.weights.receive import Receiver

Outcome = tuple[Any, Exception | None]
"""A call's answer, or its error. vLLM would keep no more of an error than its text, and lose step with the others."""


class WeightExtension:
    """Mixed into vLLM's worker class (``worker_extension_cls``); reached by ``collective_rpc``.

    The prefix keeps the names apart from the worker's own. Arguments and results are plain data.
    """

    model_runner: Any

    def vectorlm_prepare(self, kind: str) -> Outcome:
        """Make the receiver for the loaded model; answer with the kind it chose."""

        def prepare() -> str:
            model = self.model_runner.get_model()
            chosen = choose_receiver(kind, model)
            self._vectorlm_receiver = Receiver(model, chosen)
            if (manager := getattr(self.model_runner, "lora_manager", None)) is not None:
                self._vectorlm_adapter = AdapterReceiver(manager, model)
            return chosen

        return _outcome(prepare)

    def vectorlm_describe(self, manifest: Sequence[TensorSpec]) -> Outcome:
        """Answer with what this worker takes of the trainer's tensors."""
        return _outcome(lambda: self._vectorlm_receiver.describe(manifest))

    def vectorlm_attach(self, layout: Layout) -> Outcome:
        """Map the arena; answer with the bytes that each update copies out of it."""
        return _outcome(lambda: self._vectorlm_receiver.attach(layout))

    def vectorlm_load(self, version: int, with_checksums: bool) -> Outcome:
        """Take the arena's weights over; answer with checksums, if asked for."""
        return _outcome(lambda: self._vectorlm_receiver.load(version, with_checksums))

    def vectorlm_connect_adapter(self, manifest: Sequence[TensorSpec], arena_path: str | None) -> Outcome:
        """Find the LoRA layers for the trainer's adapter; answer with the layout of its arena."""
        return _outcome(lambda: self._vectorlm_adapter.connect(manifest, arena_path))

    def vectorlm_load_adapter(self, expected: Sequence[int] | None) -> Outcome:
        """Take the adapter over; answer with the seconds it took."""
        return _outcome(lambda: self._vectorlm_adapter.load(expected))

    def vectorlm_clear_adapter(self) -> Outcome:
        """Run on the base model alone."""
        return _outcome(self._vectorlm_adapter.clear)


def _outcome(work: Callable[[], Any]) -> Outcome:
    try:
        return work(), None
    except VectorLMError as error:
        return None, error
    except Exception as error:
        return None, EngineError(
            f"{type(error).__name__}: {error}\n\nIn the worker:\n{traceback.format_exc()}"
        )


def choose_receiver(kind: str, model: Any) -> str:
    """Resolve `auto`: `packed` for models on CPU of some size, `live` otherwise."""
    parameters = list(model.parameters())
    on_host = all(parameter.device.type == "cpu" for parameter in parameters)
    if kind == "auto":
        is_large = packs_by_itself(sum(parameter.numel() for parameter in parameters))
        return "packed" if on_host and is_large else "live"
    if kind == "packed" and not on_host:
        raise ValueError("receiver='packed' is for models on CPU; on CUDA there is only 'live'.")
    return kind
