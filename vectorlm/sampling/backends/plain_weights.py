"""Weights that are copied from the arena into tensors of the same names and shapes, for backends of plain torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from vectorlm.errors import ChecksumMismatch, EngineError
from vectorlm.sampling.weights.arena import Arena
from vectorlm.sampling.weights.inspection import checksum
from vectorlm.sampling.weights.layout import plain_slots
from vectorlm.sampling.weights.plan import Layout, TensorSpec, dtype_name, shortened


class PlainWeights:
    """Implements `connect` and `load` of `vectorlm.sampling.contract.Backend`."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._layout: Layout | None = None

    def connect(
        self,
        manifest: Sequence[TensorSpec],
        arena_path: str | None,
        weight_set: str,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> Layout:
        """Give every tensor of `manifest` a slot, in the dtype of its namesake in `tensors`, or in float32."""
        if weight_set != "base":
            raise EngineError("this backend takes no adapters: use lora_mode='merged'.")
        dtypes = {} if tensors is None else {name: dtype_name(each.dtype) for name, each in tensors.items()}
        num_bytes, slots = plain_slots(manifest, lambda name: dtypes.get(name, "float32"))
        self.close()
        self._arena = Arena.open(arena_path, num_bytes) if arena_path else Arena.create(num_bytes)
        self._layout = Layout(arena_path or self._arena.path, num_bytes, slots, num_bytes)
        return self._layout

    def load(
        self, checksums: Sequence[int] | None, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> float:
        """Copy the arena into `tensors`, compare `checksums` if given, and return the seconds it took."""
        assert self._arena is not None, "connect comes before load"
        assert self._layout is not None
        start = time.perf_counter()
        held = {slot.name: self._arena.view(slot) for slot in self._layout.slots}
        if tensors is not None:
            for name, sent in held.items():
                tensors[name].data.copy_(sent)
            held = {name: tensors[name].data for name in held}
        if checksums is not None:
            wrong = [
                slot.name
                for slot, expected in zip(self._layout.slots, checksums, strict=True)
                if checksum(held[slot.name], word_bytes=slot.word_bytes) != expected
            ]
            if wrong:
                raise ChecksumMismatch(
                    f"after the update {len(wrong)} of {len(held)} tensors are not those that the trainer sent: "
                    f"{shortened(wrong)}."
                )
        return time.perf_counter() - start

    def close(self) -> None:
        """Close the arena."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None
