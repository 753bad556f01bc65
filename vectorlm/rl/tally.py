"""Sums over the tokens of optimizer steps, on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from vectorlm.ranks.topology import Topology


class Tally:
    """Adds up metrics of micro-batches; one exchange between ranks per optimizer step.

    >>> tally.begin_step(num_tokens)         # doctest: +SKIP
    >>> tally.add("policy/loss", loss)       # once per micro-batch, on every rank
    >>> tally.end_step()
    """

    def __init__(self, topology: Topology) -> None:
        """Start with nothing."""
        self._topology = topology
        self._num_tokens = 1
        self._sums: dict[str, torch.Tensor] = {}
        self._largest: dict[str, torch.Tensor] = {}
        self._history: dict[str, list[float]] = {}

    def begin_step(self, num_tokens: int) -> None:
        """Begin an optimizer step.

        Args:
            num_tokens: Its tokens on all ranks, which means over tokens are divided by.
        """
        self._num_tokens, self._sums, self._largest = num_tokens, {}, {}

    def add(self, name: str, share: torch.Tensor) -> None:
        """Add a micro-batch's share of a sum that is the step's value."""
        share = share.detach().double()
        self._sums[name] = self._sums[name] + share if name in self._sums else share

    def add_tokens(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add a micro-batch's tokens to a mean over all tokens of the step [B, T]."""
        self.add(name, torch.where(mask, values, 0.0).sum() / self._num_tokens)

    def add_largest(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Take note of the largest value of a token, at least 0."""
        largest = torch.where(mask, values, 0.0).max().detach().double()
        self._largest[name] = torch.maximum(self._largest.get(name, largest), largest)

    def note(self, name: str, value: float) -> None:
        """Take note of a value that all ranks know."""
        self._history.setdefault(name, []).append(value)

    def end_step(self) -> dict[str, float]:
        """Add up over ranks; returns this step's values. Every rank has added the same names."""
        values: dict[str, float] = {}
        for found, operation in ((self._sums, dist.ReduceOp.SUM), (self._largest, dist.ReduceOp.MAX)):
            if not found:
                continue
            together = torch.stack(list(found.values()))
            if self._topology.world_size > 1:
                dist.all_reduce(together, operation)
            values |= dict(zip(found, together.tolist(), strict=True))
        for name, value in values.items():
            self.note(name, value)
        return values

    def averages(self) -> dict[str, float]:
        """Return the mean of each metric over the optimizer steps; of largest values, the largest."""
        return {
            name: max(values) if name.endswith("_max") else sum(values) / len(values)
            for name, values in self._history.items()
        }
