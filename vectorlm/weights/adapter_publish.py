"""The trainer's side of an adapter swap: the base model once, and from then on the adapters alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vectorlm.ranks.topology import Topology
from vectorlm.weights.lora_sources import adapter_sources, merged_sources
from vectorlm.weights.plan import Layout, TensorSpec, trainer_tensors
from vectorlm.weights.publish import Publisher, Share
from vectorlm.weights.source import manifest_from

Fingerprint = tuple[tuple[int, int], ...]


class AdapterPublisher:
    """Stands where a `Publisher` does, in an engine that has LoRA layers of its own.

    The base model is frozen, so it crosses once. It crosses again when the engine may have lost it, or when the
    trainer's copy was written to: every tensor counts the operations that changed it in place.
    """

    def __init__(self, base: Publisher, topology: Topology) -> None:
        """Start with the line for the base model, `base`, and without one for adapters."""
        self._base = base
        self._topology = topology
        self._adapter: Publisher | None = None
        self._held_base: Fingerprint = ()
        self._with_base = True
        self.manifest: tuple[TensorSpec, ...] = ()
        """The adapter tensors that the line is laid out for."""

    @property
    def swapped(self) -> tuple[str, ...]:
        """What the coming update replaces: `base`, `adapter`, or both."""
        return ("base",) * self._with_base + ("adapter",) * (self._adapter is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that the coming update replaces."""
        adapter = self._adapter.num_bytes if self._adapter is not None else 0
        return self._with_base * self._base.num_bytes + adapter

    def look(self, model: torch.nn.Module) -> tuple[tuple[TensorSpec, ...], bool]:
        """Return the adapter tensors of `model`, and whether its base is another than the engine holds.

        Raises:
            ConfigError: The engine's LoRA layers cannot compute what the model's adapters do.
        """
        manifest = manifest_from(adapter_sources(model, self._topology))
        return manifest, self._held_base != _fingerprint(model)

    def prepare(self, with_base: bool, manifest: tuple[TensorSpec, ...], layout: Layout | None) -> None:
        """Set up the coming update.

        Args:
            with_base: Whether the base model crosses too.
            manifest: The adapter tensors, from `look`.
            layout: Where they go, if the line has to be laid anew; None keeps the one there is.
        """
        self._with_base = with_base
        if manifest == self.manifest:
            return
        if self._adapter is not None:
            self._adapter.close()
        self._adapter = Publisher(layout, self._topology, adapter_sources) if layout is not None else None
        self.manifest = manifest

    def shares(self, model: torch.nn.Module) -> list[Share]:
        """Work out what this rank publishes of `model`, the base first; raises as `Publisher.shares` does."""
        adapter = self._adapter.shares(model) if self._adapter is not None else []
        if not self._with_base:
            return adapter
        self._coming_base = _fingerprint(model)
        return self._base.shares(model) + adapter

    def write(self, shares: Sequence[Share], with_checksums: bool = False) -> list[int]:
        """Copy `shares` into the arenas, as `Publisher.write` does."""
        sums = self._base.write(shares, with_checksums)
        if self._with_base:
            self._held_base = self._coming_base
        return sums

    def close(self) -> None:
        """Let go of both arenas."""
        self._base.close()
        if self._adapter is not None:
            self._adapter.close()


def make_publisher(layout: Layout, topology: Topology, lora_mode: str) -> Publisher | AdapterPublisher:
    """Map the base model's arena, and write into it what `lora_mode` (`adapter` or `merged`) says."""
    if lora_mode == "adapter":
        return AdapterPublisher(Publisher(layout, topology), topology)
    return Publisher(layout, topology, merged_sources)


def _fingerprint(model: torch.nn.Module) -> Fingerprint:
    """Tell whether any tensor of the base model was replaced or changed in place since; costs no reading of memory."""
    found = []
    for tensor in trainer_tensors(model).values():
        local = getattr(tensor, "_local_tensor", tensor)
        found.append((local.data_ptr(), local._version))
    return tuple(found)
