"""The line to the engine for weights that somebody else's trainer publishes."""

from __future__ import annotations

from collections.abc import Sequence

from vectorlm.contracts import WeightSource
from vectorlm.errors import WeightMismatch
from vectorlm.weights.plan import Layout


class SourcePublisher:
    """Stands where a `Publisher` does: it checks what a `WeightSource` brings, and has it write."""

    swapped = ("base",)
    """What an update replaces."""

    def __init__(self, layout: Layout) -> None:
        """Take the layout that was made for the source's manifest."""
        self._layout = layout
        self._held = [(slot.name, slot.shape) for slot in layout.slots]
        self.num_bytes = sum(slot.num_bytes for slot in layout.slots)
        """Bytes of weights that one update replaces."""

    def shares(self, source: WeightSource) -> list[WeightSource]:
        """Check, before anything is written, that the source is the one that the layout was made for.

        Raises:
            WeightMismatch: It lists other tensors.
        """
        listed = [(spec.name, tuple(spec.shape)) for spec in source.manifest()]
        if listed != self._held:
            other = [*set(listed).symmetric_difference(self._held)][:8]
            raise WeightMismatch(
                f"the manifest lists {len(listed)} tensors, the engine was connected for {len(self._held)}; on one "
                f"side only, or in another order: {other}."
            )
        return [source]

    def write(self, shares: Sequence[WeightSource], with_checksums: bool = False) -> list[int]:
        """Have the source write this rank's part; return its sums, if asked for.

        Raises:
            WeightMismatch: There are not as many sums as tensors.
        """
        (source,) = shares
        sums = list(source.publish(self._layout, with_checksums))
        if len(sums) != len(self._held) * with_checksums:
            raise WeightMismatch(f"publish returned {len(sums)} checksums for {len(self._held)} tensors.")
        return sums

    def close(self) -> None:
        """Do nothing: the arena is the source's to map."""
