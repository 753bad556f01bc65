"""Receive an adapter in the engine: fill vLLM's LoRA layers, and sum them to prove the update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vectorlm.errors import ChecksumMismatch, WeightMismatch
from vectorlm.sampling.weights.copy_list import CopyList
from vectorlm.sampling.weights.exports import Export
from vectorlm.sampling.weights.inspection import checksums, row_sums
from vectorlm.sampling.weights.plan import Layout, TensorSpec, dtype_name, dtype_of, shortened
from vectorlm.sampling.weights.record import Copy, LoadPlan, View
from vectorlm.sampling.weights.unlisted import held_tensors

POLICY_ID = 1
"""vLLM's number of the adapter that is trained."""


@dataclass(frozen=True)
class LoraSlot:
    """The place of one adapter's A and B in the engine."""

    layer: Any
    """vLLM's LoRA layer; a fused one has the adapters of several trainer layers."""
    index: int
    """The index of the adapter in a fused layer."""

    def buffers(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's A [max_rank, in] and B [out, max_rank] for vLLM's adapter `slot`."""
        a, b = self.layer.lora_a_stacked, self.layer.lora_b_stacked
        if isinstance(a, tuple):
            return a[self.index][slot, 0], b[self.index][slot, 0]
        # An embedding looks up its A: [slots, vocabulary, max_rank].
        return (a[slot].t() if a.ndim == 3 else a[slot, 0]), b[slot, 0]

    def piece(self, factor: torch.Tensor, is_a: bool) -> torch.Tensor | None:
        """Return this worker's part of a whole factor; None if it is not a single view.

        The layer of a parallel engine cuts it, as when vLLM loads an adapter.
        """
        stacked = self.layer.lora_a_stacked
        if not isinstance(stacked, tuple) or getattr(self.layer, "tp_size", 1) == 1:
            return factor
        cut = self.layer.slice_lora_a if is_a else self.layer.slice_lora_b
        parts = [factor if index == self.index else None for index in range(len(stacked))]
        piece: torch.Tensor = cut(parts)[self.index] if len(stacked) > 1 else cut(factor)
        return piece if piece.untyped_storage()._cdata == factor.untyped_storage()._cdata else None


class AdapterReceiver:
    """The receiver of an engine's adapters, one at a time; the policy's is zero until its first update."""

    def __init__(self, worker_manager: Any, model: Any) -> None:
        """Use the LoRA layers of `model`, which vLLM's ``LRUCacheWorkerLoRAManager`` manages."""
        self._worker_manager = worker_manager
        self._manager = worker_manager._adapter_manager
        mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
        self._mapper = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper
        self._lora_slots: dict[str, LoraSlot] = {}
        self._tensors: Mapping[str, torch.Tensor] = {}
        self.copies: CopyList | None = None
        """The copies of each update; None before `attach`."""
        self.clear(POLICY_ID)

    def describe(self, manifest: Sequence[TensorSpec]) -> LoadPlan:
        """Find the places of ``<layer>.lora_A`` and ``<layer>.lora_B`` of every layer with an adapter.

        Raises:
            WeightMismatch: vLLM has no such LoRA layer, or one of another size; the text names the tensors.
        """
        places = dict(self._places())
        pieces: dict[str, View] = {}
        lora_slots: dict[str, LoraSlot] = {}
        missing, misfits = [], []
        for spec in manifest:
            name, is_a = spec.name, spec.name.endswith(".lora_A")
            lora_slot = places.get(self._engine_name(name.rpartition(".")[0]))
            factor = torch.empty(spec.shape, device="meta")
            piece = None if lora_slot is None else lora_slot.piece(factor, is_a)
            if lora_slot is None or piece is None:
                missing.append(name)
                continue
            pieces[name] = View.of(piece, int(piece.storage_offset()))
            lora_slots[name] = lora_slot
            shape, largest = tuple(piece.shape), tuple(lora_slot.buffers(0)[not is_a].shape)
            rank, size = shape if is_a else shape[::-1]
            max_rank, width = largest if is_a else largest[::-1]
            if rank > max_rank:
                misfits.append(f"{name} has rank {rank}, max_lora_rank is {max_rank}")
            elif size != width:
                misfits.append(f"{name} {shape} for {largest}")
        if missing:
            raise WeightMismatch(
                f"vLLM has no LoRA layer, or a layer that is split over devices in several parts, for {len(missing)} "
                f"adapter tensors: {shortened(missing)}. Use lora_mode='merged', which sends merged weights."
            )
        if misfits:
            raise WeightMismatch(
                f"the engine's LoRA layers have no room for {len(misfits)} adapter tensors: {'; '.join(misfits[:4])}. "
                "Build the engine with a larger max_lora_rank, or use lora_mode='merged'."
            )
        self._pieces, self._lora_slots = pieces, lora_slots
        copies = tuple(
            Copy(name, view, name, View.of(torch.empty(view.shape, device="meta"), 0))
            for name, view in pieces.items()
        )
        dtypes = {name: dtype_name(lora_slot.buffers(0)[0].dtype) for name, lora_slot in lora_slots.items()}
        # The plan copies whole factors, because vLLM's layers cut them.
        self._whole = LoadPlan.whole(manifest, dtypes.__getitem__)
        return LoadPlan(copies, dtypes, {name: view.count for name, view in pieces.items()})

    def attach(self, layout: Layout, exports: Sequence[Export] = ()) -> int:
        """Open the arena, or the exports of the ranks; return the bytes that each update copies."""
        # On the host, where vLLM pins the tensors of an adapter.
        tensors = {slot.name: torch.empty(slot.shape, dtype=dtype_of(slot.dtype)) for slot in layout.slots}
        earlier, self._tensors = self.copies, tensors
        self.copies = CopyList(layout, exports, self._whole, tensors, may_alias=False)
        self._word_bytes = {slot.name: slot.word_bytes for slot in layout.slots}
        if earlier is not None:
            earlier.close()
        return self.copies.num_bytes

    def load(self, adapter_id: int) -> None:
        """Copy the last round into the slot of this adapter, or into a free one."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        assert self.copies is not None, "attach comes before load"
        self.copies.copy_round()
        # Clones, because vLLM keeps the tensors and the next update writes to these.
        tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        layers = {}
        for name in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
            a, b = tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]
            own = self._engine_name(name)
            layers[own] = LoRALayerWeights(own, len(a), len(a), a, b, scaling=1.0)
        self._manager.remove_adapter(adapter_id)
        self._manager.add_adapter(LoRAModel(adapter_id, max(len(a) for a in tensors.values()), layers))
        self._manager.activate_adapter(adapter_id)
        # vllm before 0.33: sleep drops the rows of the batch's adapters too, and vLLM writes only changes of them.
        self._manager._last_mapping = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def checksums(self, adapter_id: int) -> list[int]:
        """Sum the pieces of all tensors in the slot of this adapter.

        Raises:
            ChecksumMismatch: The buffers contain more than this adapter.
        """
        slot = self._manager.lora_index_to_id.index(adapter_id)
        sums, filled = [], []
        for name, view in self._pieces.items():
            buffer = self._lora_slots[name].buffers(slot)[not name.endswith(".lora_A")]
            rows = buffer[: view.shape[0], : view.shape[1]]
            filled.append(rows.count_nonzero())
            sums.append((row_sums(rows, self._word_bytes[name]), view.offset // view.stride[0]))
        found = [buffer.count_nonzero() for _, place in self._places() for buffer in place.buffers(slot)]
        # One read, because each waits for the device.
        if num_more := int(torch.stack(found).sum() - torch.stack(filled).sum()):
            raise ChecksumMismatch(
                f"after the update the engine's LoRA layers contain {num_more} numbers that the trainer "
                "did not send."
            )
        return checksums(sums)

    def clear(self, adapter_id: int) -> None:
        """Set the adapter to zero."""
        self._manager.remove_adapter(adapter_id)
        self._worker_manager.add_dummy_lora(adapter_request("dummy", adapter_id), rank=1)
        self._manager.activate_adapter(adapter_id)

    def remove(self, adapter_id: int) -> None:
        """Free the adapter's slot, if it has one."""
        self._manager.remove_adapter(adapter_id)

    def reset(self) -> None:
        """Remove all adapters except for the policy's, which becomes zero."""
        for adapter_id in list(filter(None, self._manager.lora_index_to_id)):
            self.remove(adapter_id)
        self.clear(POLICY_ID)

    def stacked(self) -> dict[str, list[torch.Tensor]]:
        """Return the buffers of all LoRA layers, which `clear` and `load` fill, by layer and attribute."""
        return {
            f"{name}.{attribute}": [tensor for _, tensor in held_tensors(value)]
            for name, layer in self._manager.modules.items()
            for attribute, value in vars(layer).items()
            if attribute.endswith("_stacked")
        }

    def _places(self) -> Iterator[tuple[str, LoraSlot]]:
        """Yield the layers that can have an adapter, with the engine's names of the unfused layers."""
        for name, layer in self._manager.modules.items():
            parts = self._manager.packed_modules.get(name, [name])
            # Experts, and fused layers whose parts are not separate slices, have other buffers.
            if hasattr(layer, "lora_a_stacked") and getattr(layer, "n_slices", 1) == len(parts):
                yield from ((part, LoraSlot(layer, index)) for index, part in enumerate(parts))

    def _engine_name(self, layer: str) -> str:
        renamed = self._mapper._map_name(f"{layer}.weight") if self._mapper is not None else None
        return layer if renamed is None else renamed.removesuffix(".weight")


def adapter_request(name: str, adapter_id: int) -> Any:
    """Return vLLM's ``LoRARequest`` for an adapter."""
    from vllm.lora.request import LoRARequest

    # vLLM reads the path only if the adapter is not loaded, which never happens.
    return LoRARequest(name, adapter_id, "/in/memory/only")
