"""The parts of an engine's weights that a swap replaces: its base model, and the adapter on top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vectorlm.weights.plan import Layout, TensorSpec
from vectorlm.weights.receivers import Call, Receivers, ask_all


class SwappedParts:
    """Calls the receivers in the engine's workers, part by part."""

    def __init__(self, call: Call, with_adapter: bool) -> None:
        """Speak to the workers through `call`, the engine's ``collective_rpc``; know whether it has LoRA layers."""
        self._call = call
        self._base = Receivers(call)
        self._num_base_tensors = 0
        self._with_adapter = with_adapter
        self.adapter_request: Any = None
        """What every request carries; None in an engine without LoRA layers."""
        if with_adapter:
            from vectorlm.weights.adapter_receive import adapter_request

            # From the start, so that requests under way follow the first adapter too; it is zero until then.
            self.adapter_request = adapter_request()

    def prepare(self, kind: str) -> str:
        """Make the receivers for the loaded model; return the kind that they chose, `live` or `packed`."""
        return self._base.prepare(kind)

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None, part: str) -> Layout:
        """Match the trainer's tensors with those of one part."""
        if part == "adapter":
            return ask_all(self._call, "vectorlm_connect_adapter", manifest, arena_path)[0]
        self._num_base_tensors = len(manifest)
        return self._base.connect(manifest, arena_path)

    def load(self, version: int, sums: Sequence[int] | None, swapped: Sequence[str]) -> float:
        """Take over what was written, and return the seconds it took."""
        split = self._num_base_tensors if "base" in swapped else 0
        load_s = 0.0
        if "base" in swapped:
            load_s += self._base.load(version, None if sums is None else sums[:split])
        if "adapter" in swapped:
            rest = None if sums is None else sums[split:]
            load_s += max(ask_all(self._call, "vectorlm_load_adapter", rest))
        elif self._with_adapter:
            ask_all(self._call, "vectorlm_clear_adapter")
        return load_s
