"""Checksums of a vLLM server's parameters over HTTP, for ``vectorlm verify`` and for trainers of other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vectorlm.errors import VectorLMError
from vectorlm.sampling.backends.vllm.extension import WeightExtension
from vectorlm.sampling.backends.vllm.shim import adapt_to_cpu
from vectorlm.sampling.weights.wire import arguments_from_wire, result_to_wire

# vLLM imports this module in every worker before it loads the model; on CPU it would drop the weights.
adapt_to_cpu()


class ServerExtension:
    """A mixin for vLLM's worker class, for ``vllm serve --worker-extension-cls``; it changes nothing."""

    model_runner: Any

    def vectorlm_sums(self, manifest: Sequence[Any]) -> dict[str, Any]:
        """Return the `WorkerSums` of the tensors of `manifest`, both in JSON."""
        worker, method = WeightExtension(), "vectorlm_parameter_sums"
        worker.model_runner = self.model_runner
        worker._vectorlm_packs = getattr(getattr(self, "weight_transfer_engine", None), "is_packed", False)
        try:
            return result_to_wire(getattr(worker, method)(*arguments_from_wire(method, [manifest])))
        except VectorLMError as error:
            return result_to_wire((None, error))
