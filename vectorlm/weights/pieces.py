"""The pieces of the trainer's tensors that the workers of an engine hold between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from vectorlm.errors import WeightMismatch
from vectorlm.weights.checksum import widest_word
from vectorlm.weights.layout import Intake
from vectorlm.weights.plan import TensorSpec, dtype_of
from vectorlm.weights.record import View


class Pieces:
    """Knows which worker holds which piece of which tensor, and which pieces are held more than once.

    Workers of a parallel engine hold disjoint pieces of most tensors, and the same piece of some: norms, and key and
    value heads where there are fewer of them than workers.
    """

    def __init__(self, manifest: Sequence[TensorSpec], intakes: Sequence[Intake]) -> None:
        """Sort the pieces.

        Args:
            manifest: What the trainer sends.
            intakes: What each worker takes of it.

        Raises:
            WeightMismatch: A tensor, or a part of one, is used by no worker.
        """
        self._manifest = tuple(manifest)
        self._holders: dict[str, dict[View, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for worker, intake in enumerate(intakes):
            for index, copy in enumerate(intake.copies):
                self._holders[copy.source][copy.source_view].append((worker, index))
        self._require_all_used()

    def word_bytes(self, spec: TensorSpec, dtype: str) -> int:
        """Return the widest checksum word that neither a row nor a piece of the tensor cuts."""
        lengths = [torch.Size(spec.shape[1:]).numel()]
        for view in self._holders[spec.name]:
            lengths += _boundaries(view)
        return widest_word(*(length * dtype_of(dtype).itemsize for length in lengths))

    def wrong(self, expected: Mapping[str, int], sums: Sequence[Sequence[int]]) -> list[str]:
        """Name the tensors that the workers do not hold as they were sent.

        Args:
            expected: The checksum of each whole tensor.
            sums: For each worker, the checksum of the piece that each of its copies filled.
        """
        return [name for name, total in expected.items() if self._total(name, sums) != total]

    def _total(self, name: str, sums: Sequence[Sequence[int]]) -> int | None:
        """Add up the distinct pieces of a tensor; None where holders of one piece do not hold the same."""
        total = 0
        for holders in self._holders[name].values():
            first, *others = {sums[worker][index] for worker, index in holders}
            if others:
                return None
            total += first
        return total % 2**64

    def _require_all_used(self) -> None:
        unused = [
            f"{spec.name} {spec.shape}"
            for spec in self._manifest
            if sum(view.count for view in self._holders[spec.name]) < torch.Size(spec.shape).numel()
        ]
        if unused:
            raise WeightMismatch(
                f"the trainer sends {len(self._manifest)} tensors, but the engine leaves {len(unused)} of them unused, "
                f"whole or in part: {', '.join(unused)}. The trainer's model and the engine's are not the same "
                "architecture."
            )


def _boundaries(view: View) -> list[int]:
    """Return lengths, in elements, whose common divisors divide the start and the end of every run of `view`."""
    run, steps = 1, []
    for stride, size in sorted(zip(view.stride, view.shape, strict=True)):
        if stride == run:
            run *= size
        elif size != 1:
            steps.append(stride)
    return [view.offset, run, *steps]
