"""The calls that reach a receiver inside vLLM's worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from vectorlm.ranks.engine_ranks import CallResult, capture
from vectorlm.sampling.backends.vllm import packs_by_itself
from vectorlm.sampling.backends.vllm.pack import (
    check_packed,
    pack,
    require_no_latent_attention,
    require_plain_layers,
    use_norm_kernel,
)
from vectorlm.sampling.weights.exports import Export
from vectorlm.sampling.weights.held import held_by
from vectorlm.sampling.weights.lora_receive import AdapterReceiver
from vectorlm.sampling.weights.plan import BASE, Layout, TensorSpec
from vectorlm.sampling.weights.receive import WorkerReceiver


def as_call_result(method: Callable[..., Any]) -> Callable[..., CallResult]:
    """Return errors beside answers: vLLM would keep only an error's text, and its workers would lose step."""

    @functools.wraps(method)
    def call(*args: Any) -> CallResult:
        return capture(lambda: method(*args), "the worker")

    return call


class WeightExtension:
    """Mixed into vLLM's worker class (``worker_extension_cls``); `EngineReceiver` calls it through ``collective_rpc``.

    The prefix keeps the names apart from the worker's own. Arguments and answers are plain data.
    """

    model_runner: Any

    @as_call_result
    def vectorlm_prepare(self, kind: str) -> str:
        """Make the receivers for the loaded model; answer with the kind that was chosen."""
        model = self.model_runner.get_model()
        chosen = choose_receiver(kind, model)
        if is_on_cpu(model):
            use_norm_kernel()
        require_plain_layers(model)
        self._vectorlm_packs = chosen == "packed"
        if self._vectorlm_packs:
            pack(model)
        self._vectorlm_receivers: dict[str, Any] = {BASE: WorkerReceiver(model)}
        if (manager := getattr(self.model_runner, "lora_manager", None)) is not None:
            self._vectorlm_receivers["adapter"] = AdapterReceiver(manager, model)
        return chosen

    @as_call_result
    def vectorlm_describe(self, weight_set: str, manifest: Sequence[TensorSpec]) -> Any:
        """Answer with the `LoadPlan` of what this worker takes of the trainer's tensors."""
        require_no_latent_attention(self.model_runner.get_model())
        return self._vectorlm_receivers[weight_set].describe(manifest)

    @as_call_result
    def vectorlm_attach(self, weight_set: str, layout: Layout, exports: Sequence[Export] = ()) -> Any:
        """Open the arena, or what the ranks export; answer with the bytes that each update copies."""
        return self._vectorlm_receivers[weight_set].attach(layout, exports)

    @as_call_result
    def vectorlm_copy(self, weight_set: str, number: int) -> Any:
        """Copy one round out of the arena."""
        return self._vectorlm_receivers[weight_set].copies.copy_round(number)

    @as_call_result
    def vectorlm_load(self, weight_set: str, version: int, with_checksums: bool) -> Any:
        """Take the last round over, and pack it; answer with checksums, if asked for."""
        receiver = self._vectorlm_receivers[weight_set]
        receiver.load()
        is_packed = self._vectorlm_packs and weight_set == BASE
        if is_packed:
            pack(self.model_runner.get_model())
        sums = receiver.checksums() if with_checksums else []
        if is_packed and with_checksums:
            check_packed(self.model_runner.get_model(), seed=version)
        return sums

    @as_call_result
    def vectorlm_empty_kv_cache(self) -> Any:
        """Overwrite every block with zeros."""
        for cache in self.model_runner.kv_caches:
            for block in cache if isinstance(cache, list | tuple) else [cache]:
                block.zero_()

    @as_call_result
    def vectorlm_held(self, manifest: Sequence[TensorSpec]) -> Any:
        """Answer with the `Held` of the trainer's tensors, whoever loaded them; needs no `vectorlm_prepare`."""
        model = self.model_runner.get_model()
        require_no_latent_attention(model)
        require_plain_layers(model)
        if getattr(self, "_vectorlm_packs", False):
            check_packed(model)
        return held_by(model, manifest)

    @as_call_result
    def vectorlm_clear(self, weight_set: str) -> Any:
        """Compute without this set."""
        return self._vectorlm_receivers[weight_set].clear()


def choose_receiver(kind: str, model: Any) -> str:
    """Resolve `auto`: `packed` for models on CPU of some size, `live` otherwise."""
    on_host = is_on_cpu(model)
    if kind == "auto":
        is_large = packs_by_itself(sum(parameter.numel() for parameter in model.parameters()))
        return "packed" if on_host and is_large else "live"
    if kind == "packed" and not on_host:
        raise ValueError("receiver='packed' is for models on CPU; on CUDA there is only 'live'.")
    return kind


def is_on_cpu(model: Any) -> bool:
    """Whether the whole model lies in the host's memory."""
    return all(parameter.device.type == "cpu" for parameter in model.parameters())
