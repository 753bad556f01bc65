"""The calls of `EngineReceiver` inside vLLM's worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from vectorlm.errors import WeightMismatch
from vectorlm.ranks.engine_ranks import CallResult, capture
from vectorlm.sampling.backends.vllm import packs_by_itself
from vectorlm.sampling.backends.vllm.pack import (
    check_packed,
    compute_exactly,
    derive,
    derived_names,
    keeps_base,
    pack,
    packed_experts,
    require_derivable,
    require_none,
    require_plain_layers,
    stale_derived,
    use_norm_kernel,
)
from vectorlm.sampling.backends.vllm.quantised import check_quantised, renew_products
from vectorlm.sampling.backends.vllm.routes import RouteCapture
from vectorlm.sampling.weights.exports import Export
from vectorlm.sampling.weights.inspection import checksums, row_sums
from vectorlm.sampling.weights.lora_receive import POLICY_ID, AdapterReceiver
from vectorlm.sampling.weights.plan import ADAPTER, BASE, Layout, TensorSpec
from vectorlm.sampling.weights.receive import WorkerReceiver, parameter_sums
from vectorlm.sampling.weights.unlisted import UnlistedTensors


def as_call_result(method: Callable[..., Any]) -> Callable[..., CallResult]:
    """Return errors as values: vLLM would keep only the text of an exception, and its workers would go out of step."""

    @functools.wraps(method)
    def call(*args: Any) -> CallResult:
        return capture(lambda: method(*args), "the worker")

    return call


class WeightExtension:
    """A mixin for vLLM's worker class (``worker_extension_cls``); `EngineReceiver` calls it through ``collective_rpc``.

    The prefix ``vectorlm_`` avoids collisions with the worker's own names. Arguments and answers are plain data.
    """

    model_runner: Any
    rank: int
    _vectorlm_unlisted: UnlistedTensors | None = None
    _vectorlm_routes: RouteCapture | None = None
    _vectorlm_may_be_quantised = True

    @as_call_result
    def vectorlm_prepare(self, kind: str) -> str:
        """Create the receivers for the loaded model; return the chosen kind.

        `auto` is `packed` for a larger model on CPU, else `live`. `exact` is `live` with the arithmetic of exact mode.
        """
        model = self.model_runner.get_model()
        is_on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        if kind == "auto":
            is_large = packs_by_itself(sum(parameter.numel() for parameter in model.parameters()))
            kind = "packed" if is_on_cpu and is_large else "live"
        elif kind == "packed" and not is_on_cpu:
            raise ValueError("receiver='packed' needs a model on CPU. Use 'live' on CUDA.")
        if is_on_cpu and kind != "exact":
            use_norm_kernel()
        self._vectorlm_keeps_base = keeps_base(model)
        if not self._vectorlm_keeps_base:
            require_plain_layers(model, self._vectorlm_may_be_quantised)
        check_quantised(model)
        if kind == "exact":
            compute_exactly(model, self.model_runner.model_config.hf_config.to_dict())
            kind = "live"
        self._vectorlm_packs = kind == "packed"
        if self._vectorlm_packs:
            pack(model)
        derived = derived_names(model)
        self._vectorlm_derives = bool(derived)
        self._vectorlm_receivers: dict[str, Any] = {BASE: WorkerReceiver(model, derived)}
        if (manager := getattr(self.model_runner, "lora_manager", None)) is not None:
            self._vectorlm_receivers[ADAPTER] = AdapterReceiver(manager, model)
        return kind

    @as_call_result
    def vectorlm_does_keep_base(self) -> bool:
        """Return whether updates bring adapters alone, because the base has 4 bits."""
        return self._vectorlm_keeps_base

    @as_call_result
    def vectorlm_runner(self) -> str:
        """Return the model runner's generation and class, as in ``V1 (CPUModelRunner)``."""
        kinds = type(self.model_runner).__mro__
        is_v2 = any(kind.__module__.startswith("vllm.v1.worker.gpu.") for kind in kinds)
        return f"{'V2' if is_v2 else 'V1'} ({kinds[0].__name__})"

    @as_call_result
    def vectorlm_capture_routes(self) -> int:
        """Capture the experts of every token from now on; return the number of layers with experts."""
        self._vectorlm_routes = RouteCapture(self.model_runner)
        return self._vectorlm_routes.num_layers

    @as_call_result
    def vectorlm_take_routes(self, names: Sequence[str], is_wanted: bool) -> Any:
        """Return and forget the routes of ended requests. Only the first worker returns them; all have the same."""
        assert self._vectorlm_routes is not None
        return self._vectorlm_routes.take(names, is_wanted and self.rank == 0)

    @as_call_result
    def vectorlm_describe(self, weight_set: str, manifest: Sequence[TensorSpec]) -> Any:
        """Return the `LoadPlan` of this worker."""
        if weight_set == BASE:
            if self._vectorlm_keeps_base:
                raise WeightMismatch(
                    "the engine's base has 4 bits (AWQ, GPTQ) and cannot be replaced. Train LoRA adapters, and send "
                    "them with SamplingEngine.update, or serve a model in 16 bits."
                )
            require_derivable(self.model_runner.get_model(), self.model_runner.model_config.dtype)
        return self._vectorlm_receivers[weight_set].describe(manifest)

    @as_call_result
    def vectorlm_attach(self, weight_set: str, layout: Layout, exports: Sequence[Export] = ()) -> Any:
        """Open the arena, or the exports of the ranks; return the bytes that each update copies."""
        return self._vectorlm_receivers[weight_set].attach(layout, exports)

    @as_call_result
    def vectorlm_lend(self, layout: Layout) -> Any:
        """Return handles of the base's tensors and their checksums; packed copies are compared with them."""
        if self._vectorlm_packs:
            check_packed(self.model_runner.get_model())
        return self._vectorlm_receivers[BASE].lend(layout)

    @as_call_result
    def vectorlm_copy(self, weight_set: str, number: int) -> Any:
        """Copy one round out of the arena."""
        return self._vectorlm_receivers[weight_set].copies.copy_round(number)

    @as_call_result
    def vectorlm_load(
        self, weight_set: str, version: int, with_checksums: bool, adapter_id: int = POLICY_ID
    ) -> Any:
        """Load the last round and pack it; return checksums if `with_checksums`."""
        receiver = self._vectorlm_receivers[weight_set]
        if weight_set == ADAPTER:
            receiver.load(adapter_id)
        else:
            receiver.load()
        if self._vectorlm_routes is not None:
            self._vectorlm_routes.begin_generation()
        if weight_set != BASE:
            return receiver.checksums(adapter_id) if with_checksums else []
        model, dtype = self.model_runner.get_model(), self.model_runner.model_config.dtype
        if self._vectorlm_derives:
            derive(model, dtype)
        if self._vectorlm_packs:
            pack(model)
        renew_products(model)
        if not with_checksums:
            return []
        sums = receiver.checksums()
        receiver.require_computed()
        if self._vectorlm_derives:
            require_none(stale_derived(model, dtype))
        if self._vectorlm_packs:
            check_packed(model, seed=version)
        check_quantised(model, seed=version)
        return sums

    @as_call_result
    def vectorlm_before_sleep(self) -> Any:
        """List the tensors that sleeping weights may lose, with checksums and copies."""
        model = self.model_runner.get_model()
        # The KV cache comes back empty and may be asleep already; reading it would crash.
        caches = [getattr(module, "kv_cache", None) for module in model.modules()]
        brought = [self.model_runner.kv_caches, caches, packed_experts(model)]
        if (adapter := self._vectorlm_receivers.get(ADAPTER)) is not None:
            brought.append(adapter.stacked())
        self._vectorlm_unlisted = UnlistedTensors(model, brought)

    @as_call_result
    def vectorlm_after_wake(self) -> Any:
        """Compare the listed tensors; return the names of those that were restored."""
        restored = [] if self._vectorlm_unlisted is None else self._vectorlm_unlisted.restore()
        self._vectorlm_unlisted = None
        if (adapter := self._vectorlm_receivers.get(ADAPTER)) is not None:
            # The next update may send the base alone.
            adapter.reset()
        return restored

    @as_call_result
    def vectorlm_weight_sums(self) -> Any:
        """Return the checksums of everything that updates fill, the LoRA layers included."""
        sums = self._vectorlm_receivers[BASE].weight_sums()
        if (adapter := self._vectorlm_receivers.get(ADAPTER)) is not None:
            for name, tensors in adapter.stacked().items():
                sums[name] = sum(checksums([(row_sums(tensor), 0) for tensor in tensors]))
        return sums

    @as_call_result
    def vectorlm_empty_kv_cache(self) -> Any:
        """Overwrite every block of the KV cache with zeros."""
        for cache in self.model_runner.kv_caches:
            for block in cache if isinstance(cache, list | tuple) else [cache]:
                block.zero_()

    @as_call_result
    def vectorlm_parameter_sums(self, manifest: Sequence[TensorSpec]) -> Any:
        """Return the `WorkerSums` of the trainer's tensors, whoever loaded them; works without `vectorlm_prepare`."""
        model = self.model_runner.get_model()
        require_plain_layers(model)
        if getattr(self, "_vectorlm_packs", False):
            check_packed(model)
        require_derivable(model, self.model_runner.model_config.dtype)
        return parameter_sums(model, manifest, derived_names(model))

    @as_call_result
    def vectorlm_clear(self, adapter_id: int) -> Any:
        """Set an adapter to zero."""
        return self._vectorlm_receivers[ADAPTER].clear(adapter_id)

    @as_call_result
    def vectorlm_remove(self, adapter_id: int) -> Any:
        """Free the slot of an adapter."""
        return self._vectorlm_receivers[ADAPTER].remove(adapter_id)
