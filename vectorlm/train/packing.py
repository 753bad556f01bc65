"""Rows laid end to end for one forward pass: without padding, and what rows begin with in common computed once.

Source of the common beginning: Liu et al. 2025, arXiv:2506.05433 (prefix grouper).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from vectorlm.ranks.topology import Topology


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The ranks that share the tokens of each pass: every `size`-th one is this rank's, from the one at `rank` on.

    So all of them have as many tokens to compute and, about, as many that are asked for.
    """

    group: dist.ProcessGroup
    rank: int
    """This rank's index in the group."""
    size: int

    @classmethod
    def of(cls, topology: Topology) -> ContextGroup | None:
        """Make the groups, neighbours each; called on all ranks. None where each rank has passes of its own."""
        size = topology.context_parallel
        if size == 1:
            return None
        group, _ = dist.new_subgroups(size)
        return cls(group, topology.rank % size, size)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [1, n] of a pass [1, N], filled up with 0 where N is no multiple of `size`."""
        return F.pad(x, (0, -x.shape[1] % self.size))[:, self.rank :: self.size]

    def to_heads(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Turn all heads of this rank's tokens, [1, H, n, D], into its share of the heads of all, [1, H / size, N, D].

        Where `size` does not divide H, as of keys that several queries share, each head is there for several ranks.
        """
        x = x.repeat_interleave(self.size // math.gcd(x.shape[1], self.size), dim=1)
        found = self._exchange(x[0].unflatten(0, (self.size, -1)))
        return found.permute(1, 2, 0, 3).flatten(1, 2)[None, :, :num_tokens]

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Turn this rank's heads of all tokens, [1, N, h, E], into all heads of its own, [1, n, h * size, E]."""
        x = F.pad(x[0], (0, 0, 0, 0, 0, -x.shape[1] % self.size))
        found = self._exchange(x.unflatten(0, (-1, self.size)).transpose(0, 1))
        return found.transpose(0, 1).flatten(1, 2)[None]

    def gather(self, values: torch.Tensor, places: torch.Tensor, num: int) -> torch.Tensor:
        """Put values of all ranks together, [num, ...] on each of them; this rank's lie at `places`.

        Each rank then computes the whole loss, and its gradient goes back to its own values alone: gradients of the
        weights are shares, which FSDP adds up.
        """
        found = values.new_zeros(num, *values.shape[1:]).index_copy(0, places, values.detach())
        dist.all_reduce(found, group=self.group)  # Each value is one rank's: zeros change no bit of it.
        return found.index_copy(0, places, values)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Send x[r] to rank r of the group, and return what each of them sent."""
        return wait_tensor(all_to_all_single_autograd(x.contiguous(), None, None, self.group))


MOST_PADDED, SPARE = 1.25, 64
"""Stretches attend together while, padded, they have at most `MOST_PADDED` times as many tokens, plus `SPARE`."""


@dataclass(frozen=True, eq=False)
class Rows:
    """What a forward pass reads, and which of its tokens are asked for; B rows, T tokens, on the CPU."""

    input_ids: torch.Tensor
    """int64 [B, T], padded on the right."""
    attention_mask: torch.Tensor
    """int64 [B, T], 1 up to the end of each row."""
    is_asked: torch.Tensor
    """bool [B, T], the tokens whose value is asked for; the first of a row has none."""
    groups: Sequence[int]
    """B numbers: neighbours of the same number may share what they begin with."""
    labels: torch.Tensor | None = None
    """int64 [B, T], what is asked for in place of `input_ids`."""
    turn_starts: torch.Tensor | None = None
    """int64 [B, T], where the completion that each token belongs to begins; -1 for tokens of none."""

    @property
    def targets(self) -> torch.Tensor:
        """The tokens that are asked for, int64 [M], row by row."""
        return (self.input_ids if self.labels is None else self.labels)[self.is_asked]


@dataclass(frozen=True)
class Bundle:
    """Stretches of rows that lie one after the other, and attend in one go, padded to the longest of them."""

    start: int
    lengths: tuple[int, ...]
    shared: tuple[int, int] = (0, 0)
    """From where to where in the pass lies what their rows begin with."""

    @property
    def end(self) -> int:
        """The index behind its last token."""
        return self.start + sum(self.lengths)


class Packing:
    """Rows laid end to end; N tokens are computed, and M are asked for.

    Ranks that share a pass have its tokens and places split among them.

    No dataclass: FSDP2 would build one again at every block, looking for tensors to cast.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        places: torch.Tensor,
        bundles: Sequence[Bundle],
        context: ContextGroup | None = None,
    ) -> None:
        """Take `input_ids` and places in rows, int64 [1, N], and all tokens in their order as `bundles`.

        `places`, int64 [M], says where the token before each one that is asked for lies, row by row.
        """
        self.context, self.num_tokens, self.num_asked = context, input_ids.shape[1], len(places)
        self._mine: Any = slice(None)
        if context is not None:
            input_ids, position_ids = context.own(input_ids), context.own(position_ids)
            self._mine = torch.nonzero(places % context.size == context.rank)[:, 0]
            places = places[self._mine] // context.size
        self.input_ids, self.position_ids, self.places = input_ids, position_ids, places
        self.bundles = tuple(bundles)
        self.seen: dict[str, set[Any]] = {}
        """What attention layers were given besides queries, keys and values, by name."""
        self._made: dict[Any, torch.Tensor] = {}

    def arguments(self, device: str | torch.device) -> dict[str, Any]:
        """Return what a model of transformers takes for this pass."""
        return {
            "input_ids": self.input_ids.to(device),
            "position_ids": self.position_ids.to(device),
            # A mask of four dimensions is handed through as it is; without one, transformers would make one [N, N].
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            "use_cache": False,
            "packing": self,
        }

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return those of M numbers, [M, ...], that belong to the places of this rank."""
        return x[self._mine]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Put the values of all ranks' places together, as [M, ...]; undoes `own`."""
        if self.context is None:
            return values
        return self.context.gather(values, self._mine.to(values.device), self.num_asked)

    @cached_property
    def stretches(self) -> tuple[tuple[int, ...], ...]:
        """The lengths of all stretches in their order, and of the keys that each of them sees."""
        queries = [length for bundle in self.bundles for length in bundle.lengths]
        keys = [b.shared[1] - b.shared[0] + length for b in self.bundles for length in b.lengths]
        return tuple(queries), tuple(keys)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Put what a row begins with before each of its stretches, in a tensor [N, ...] of the pass."""
        if not any(bundle.shared[1] for bundle in self.bundles):
            return x
        lengths, _ = self.stretches
        # One `split` has one backward pass; a slice for each stretch would make a gradient of N tokens each.
        pieces = dict(zip(accumulate(lengths, initial=0), x.split(lengths), strict=False))
        parts, start = [], 0
        for bundle in self.bundles:
            first, last = bundle.shared
            for length in bundle.lengths:
                parts += [pieces[first]] * (last > first) + [pieces[start]]
                start += length
        return torch.cat(parts)

    def once(self, make: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """Return what `make` makes of the arguments, made once for all layers of the pass."""
        key = (make, *arguments)
        if key not in self._made:
            self._made[key] = make(*arguments)
        return self._made[key]


def num_needed(is_asked: torch.Tensor) -> list[int]:
    """Return how many tokens of each row must be computed: all before the last one that is asked for."""
    return torch.where(is_asked, torch.arange(is_asked.shape[1]), 0).amax(dim=1).tolist()


def num_shared(input_ids: torch.Tensor, needed: Sequence[int]) -> int:
    """Return how many of the needed tokens of every row [B, T] are the same in all of them."""
    if len(needed) < 2:
        return 0
    beginning = input_ids[:, : min(needed)]
    return int((beginning == beginning[0]).all(dim=0).cumprod(0).sum())


def pack(rows: Rows, context: ContextGroup | None = None) -> Packing:
    """Lay out the tokens that must be computed, at least one: all beginnings, then what follows each of them.

    The ranks of a `context` call with the same rows.
    """
    needed = num_needed(rows.is_asked)
    if not any(needed):
        needed[0] = 1
    places = torch.zeros_like(rows.input_ids)
    order: list[tuple[int, int, int]] = []
    bundles: list[Bundle] = []

    def lay(stretches: list[tuple[list[int], int, int]], shared: tuple[int, int] = (0, 0)) -> None:
        """Lay down the tokens of rows from one place to another, the longest stretch first."""
        stretches.sort(key=lambda stretch: stretch[1] - stretch[2])
        for lengths in _alike([last - first for _, first, last in stretches]):
            bundles.append(Bundle(bundles[-1].end if bundles else 0, lengths, shared))
        start = bundles[-1].end - sum(last - first for _, first, last in stretches)
        for members, first, last in stretches:
            places[members, first:last] = torch.arange(start, start + last - first)
            order.append((members[0], first, last))
            start += last - first

    used = [row for row in range(len(needed)) if needed[row]]
    beginnings, endings = [], []
    for _, neighbours in groupby(used, key=lambda row: rows.groups[row]):
        members = list(neighbours)
        shared = num_shared(rows.input_ids[members], [needed[row] for row in members])
        if shared:
            beginnings.append((members, 0, shared))
            endings.append([([row], shared, needed[row]) for row in members if needed[row] > shared])
        else:
            beginnings += [([row], 0, needed[row]) for row in members]
    lay(beginnings)
    for stretches in filter(None, endings):
        # Any of its rows knows where the beginning lies.
        (row, *_), shared, _ = stretches[0]
        start = int(places[row, 0])
        lay(stretches, (start, start + shared))
    input_ids = torch.cat([rows.input_ids[row, first:last] for row, first, last in order])
    position_ids = torch.cat([torch.arange(first, last) for _, first, last in order])
    before = places.roll(1, dims=1)[rows.is_asked]
    return Packing(input_ids[None], position_ids[None], before, bundles, context)


def _alike(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut a falling sequence where padding to the first of each part would cost more than another part."""
    parts: list[list[int]] = []
    for length in lengths:
        if parts and (len(parts[-1]) + 1) * parts[-1][0] <= MOST_PADDED * (sum(parts[-1]) + length) + SPARE:
            parts[-1].append(length)
        else:
            parts.append([length])
    return [tuple(part) for part in parts]
