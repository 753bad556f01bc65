"""What is looked at before weights are sent: that ranks hold the same, and that all numbers are finite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vectorlm.errors import NonFiniteWeights, RankMismatch
from vectorlm.sampling.weights.plan import shortened

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Inspection:
    """What a rank's weights are before any of them is sent."""

    sums: Mapping[str, tuple[int, int]]
    """By tensor, the first row that the rank holds and the checksum of all that it holds; or nothing."""
    not_finite: tuple[str, ...]
    """The tensors with a number that is not finite, or would not be in the engine's dtype."""


class FiniteCheck:
    """Finds tensors that hold a number that is not finite, or would not be in the dtype that they are sent in."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, torch.Tensor, torch.dtype]] = []
        self._sums: list[torch.Tensor] = []

    def look_at(self, name: str, rows: torch.Tensor, dtype: torch.dtype) -> None:
        """Read a tensor, which is sent in `dtype`; on CUDA this does not wait for the device."""
        import torch

        if rows.is_floating_point() and rows.numel():
            self._seen.append((name, rows, dtype))
            # The fastest look. In 16 bits a sum of many finite numbers may not be finite.
            self._sums.append(rows.sum(dtype=torch.float32))

    def wrong(self) -> tuple[str, ...]:
        """Name the tensors that were found."""
        import torch

        if not self._seen:
            return ()
        device = self._sums[0].device  # Offloaded weights and buffers lie apart.
        sound = torch.stack([each.to(device) for each in self._sums]).isfinite().tolist()
        return tuple(
            name
            for (name, rows, dtype), is_sound in zip(self._seen, sound, strict=True)
            # Even in float32 a sum may overflow where no number does, and a narrower dtype ends earlier.
            if not (is_sound and torch.finfo(dtype).max >= torch.finfo(rows.dtype).max)
            and not torch.stack(torch.aminmax(rows)).to(dtype).isfinite().all()
        )


def require_sound(inspections: Sequence[Inspection]) -> None:
    """Raise for what the inspections of one weight set, by rank, show to be wrong."""
    if wrong := sorted({name for each in inspections for name in each.not_finite}):
        ranks = [rank for rank, each in enumerate(inspections) if each.not_finite]
        raise NonFiniteWeights(
            f"{len(wrong)} tensors hold NaN, infinity or more than the engine's dtype can hold: {shortened(wrong)} "
            f"(rank {ranks[0]}). No weight of the engine has changed. Look at the loss and the learning rate; "
            "check_finite=False sends them as they are."
        )
    held: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, each in enumerate(inspections):
        for name, (first_row, total) in each.sums.items():
            held[name, first_row][total].append(rank)
    if differ := {name: ranks for (name, _), ranks in held.items() if len(ranks) > 1}:
        first, second, *_ = (ranks[0] for ranks in next(iter(differ.values())).values())
        raise RankMismatch(
            f"ranks {first} and {second} hold different numbers in {len(differ)} tensors of which both hold the same "
            f"rows: {shortened([*differ])}. No weight of the engine has changed. Shard the model with fully_shard, or "
            "give every rank the same weights and the same gradients (DistributedDataParallel)."
        )
