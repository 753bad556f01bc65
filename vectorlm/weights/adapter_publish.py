"""The trainer's side of an adapter swap: the base model once, and from then on the adapters alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from vectorlm.ranks.topology import Topology
from vectorlm.weights.lora_sources import adapter_sources, merged_sources
from vectorlm.weights.plan import Layout, TensorSpec, trainer_tensors
from vectorlm.weights.publish import Publisher, Share
from vectorlm.weights.source import manifest_from


class Fingerprint:
    """Tells whether the base model of a model may have been replaced or changed in place since; reads no weight."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Note which tensors make up the base of `model`, where they lie and how often they were changed in place."""
        self._tensors = [weakref.ref(tensor) for tensor in trainer_tensors(model).values()]
        self._states = [_state(tensor) for tensor in trainer_tensors(model).values()]

    def fits(self, model: torch.nn.Module) -> bool:
        """Return whether `model` has the same tensors, as they were; those that are trained are taken for changed."""
        tensors = list(trainer_tensors(model).values())
        # The objects too: a model that is gone may have left its addresses to the next.
        return (
            len(tensors) == len(self._tensors)
            and all(known() is tensor for known, tensor in zip(self._tensors, tensors, strict=True))
            and not any(tensor.requires_grad for tensor in tensors)
            and self._states == [_state(tensor) for tensor in tensors]
        )


def _state(tensor: torch.Tensor) -> tuple[int, int, int]:
    local = getattr(tensor, "_local_tensor", tensor)
    # An operation on a DTensor counts on the DTensor alone, one on its shard on the shard alone.
    return local.data_ptr(), tensor._version, local._version


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
        self._held_base: Fingerprint | None = None
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
        return manifest, self._held_base is None or not self._held_base.fits(model)

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
        self._coming_base = Fingerprint(model)
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
