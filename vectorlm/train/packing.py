"""Rows laid end to end for one forward pass, without padding; common beginnings of rows are computed once.

Sources: Liu et al. 2025, arXiv:2506.05433 (prefix grouper). Jacobs et al. 2023, arXiv:2309.14509 (DeepSpeed Ulysses:
ranks share the tokens of a pass, and exchange them for heads before and after attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from vectorlm.ranks.topology import Topology

if TYPE_CHECKING:
    import numpy as np

    from vectorlm.data.images import PlacedPicture

Made = TypeVar("Made")
MOST_PADDED, SPARE = 1.25, 64
"""Bounds of padding: padded stretches of one call have at most `MOST_PADDED` times their tokens, plus `SPARE`."""


def to_device(x: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Return a host tensor on `device`; the host waits neither for the copy nor for the device's other work.

    A blocking copy would wait for all earlier work, and the device would idle while the host prepares more.
    """
    device = torch.device(device)
    if x.device == device:
        return x
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The ranks that share the tokens of each pass: a rank has every `size`-th token, starting at its index.

    This gives all ranks equally many tokens to compute, and about equally many requested tokens.
    """

    group: dist.ProcessGroup
    rank: int
    """This rank's index in the group."""
    size: int

    @classmethod
    def of(cls, topology: Topology) -> ContextGroup | None:
        """Make groups of neighbouring ranks; all ranks call this. None if ranks do not share passes."""
        size = topology.context_parallel
        if size == 1:
            return None
        group, _ = dist.new_subgroups(size)
        return cls(group, topology.rank % size, size)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [1, n] of a pass [1, N], padded with 0 to a multiple of `size`."""
        return F.pad(x, (0, -x.shape[1] % self.size))[:, self.rank :: self.size]

    def to_heads(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Exchange all heads of this rank's tokens, [1, H, n, D], for its heads of all tokens, [1, H / size, N, D].

        If `size` does not divide H (grouped keys), heads are repeated for several ranks.
        """
        x = x.repeat_interleave(self.size // math.gcd(x.shape[1], self.size), dim=1)
        found = self._exchange(x[0].unflatten(0, (self.size, -1)))
        return found.permute(1, 2, 0, 3).flatten(1, 2)[None, :, :num_tokens]

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange this rank's heads of all tokens, [1, N, h, E], for all heads of its tokens, [1, n, h * size, E]."""
        x = F.pad(x[0], (0, 0, 0, 0, 0, -x.shape[1] % self.size))
        found = self._exchange(x.unflatten(0, (-1, self.size)).transpose(0, 1))
        return found.transpose(0, 1).flatten(1, 2)[None]

    def gather(self, values: torch.Tensor, places: torch.Tensor, num: int) -> torch.Tensor:
        """Return the values of all ranks, [num, ...], on each rank; this rank's values go to `places`.

        Every rank then computes the whole loss, but the gradient flows to its own values only. FSDP adds up these
        shares of the weights' gradients.
        """
        found = values.new_zeros(num, *values.shape[1:]).index_copy(0, places, values.detach())
        dist.all_reduce(found, group=self.group)  # Exact: every value is added to zeros only.
        return found.index_copy(0, places, values)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Send x[r] to rank r of the group, and return what this rank received from each."""
        return wait_tensor(all_to_all_single_autograd(x.contiguous(), None, None, self.group))


@dataclass(frozen=True, eq=False)
class Rows:
    """The input of a forward pass, and the requested tokens; B rows, T tokens, on the CPU."""

    input_ids: torch.Tensor
    """int64 [B, T], padded on the right."""
    attention_mask: torch.Tensor
    """int64 [B, T], 1 up to the end of each row."""
    is_asked: torch.Tensor
    """bool [B, T], the requested tokens, whose values are computed; the first token of a row has no value."""
    groups: Sequence[int]
    """The number of each row's group; neighbouring rows of a group may share a common beginning."""
    labels: torch.Tensor | None = None
    """int64 [B, T], the tokens to evaluate instead of `input_ids`."""
    turn_starts: torch.Tensor | None = None
    """int64 [B, T], the position where the completion of each token begins; -1 outside completions."""
    images: Sequence[Sequence[PlacedPicture]] | None = None
    """The pictures of each row, in order, if the model reads images."""
    routes: Sequence[np.ndarray | None] | None = None
    """The experts that the engine chose for the first tokens of each row, [t, L, K]; None if it returned none."""
    replayed: Sequence[np.ndarray | None] | None = None
    """The experts to use instead of the model's own choice, in the format of `routes`."""

    @property
    def targets(self) -> torch.Tensor:
        """The requested tokens, int64 [M], row by row."""
        return (self.input_ids if self.labels is None else self.labels)[self.is_asked]


@dataclass(frozen=True)
class Bundle:
    """Consecutive stretches of rows that attend in one call, padded to the longest of them."""

    start: int
    lengths: tuple[int, ...]
    shared: tuple[int, int] = (0, 0)
    """Start and end, in the pass, of the common beginning of their rows."""

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.start + sum(self.lengths)


class Packing:
    """Rows laid end to end: N computed tokens, and M requested tokens.

    Ranks that share a pass split its tokens and places.

    This is not a dataclass, because FSDP2 would rebuild it at every block while it looks for tensors to cast.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        places: torch.Tensor,
        bundles: Sequence[Bundle],
        context: ContextGroup | None = None,
        pieces: Sequence[tuple[int, int, int]] = (),
        members: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take `input_ids` and `position_ids`, int64 [1, N], and `bundles` that cover all tokens in order.

        `places`, int64 [M], has the index of the token before each requested token, row by row. `pieces` are the parts
        of rows in their order in the pass: (row, start, end). `members` are all rows that share each piece.
        """
        self.pieces, self.members = tuple(pieces), tuple(members)
        self.more: dict[str, Any] = {}
        """Further arguments of the model, such as pixels."""
        self.context, self.num_tokens, self.num_asked = context, input_ids.shape[1], len(places)
        self._mine: Any = slice(None)
        if context is not None:
            input_ids, position_ids = context.own(input_ids), context.own(position_ids)
            self._mine = torch.nonzero(places % context.size == context.rank)[:, 0]
            places = places[self._mine] // context.size
        self.input_ids, self.position_ids, self.places = input_ids, position_ids, places
        self.bundles = tuple(bundles)
        self.seen: dict[str, set[Any]] = {}
        """Values or types of all arguments of attention layers but queries, keys and values, by name."""
        self.attended: set[torch.nn.Module] = set()
        """The layers that attended."""
        self._made: dict[Any, Any] = {}

    def arguments(self, device: str | torch.device) -> dict[str, Any]:
        """Return the arguments of a transformers model for this pass."""
        return {
            "input_ids": to_device(self.input_ids, device),
            "position_ids": to_device(self.position_ids, device),
            # transformers passes on a mask with four dimensions; without a mask it would build one of [N, N].
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            "use_cache": False,
            "packing": self,
            **self.more,
        }

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of x, [M, ...], for the places of this rank."""
        return x[self._mine]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Combine the values of all ranks' places to [M, ...]; the inverse of `own`."""
        if self.context is None:
            return values
        return self.context.gather(values, to_device(self._mine, values.device), self.num_asked)

    @cached_property
    def stretches(self) -> tuple[tuple[int, ...], ...]:
        """The lengths of all stretches in order, and the number of keys that each attends to."""
        queries = [length for bundle in self.bundles for length in bundle.lengths]
        keys = [b.shared[1] - b.shared[0] + length for b in self.bundles for length in b.lengths]
        return tuple(queries), tuple(keys)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Insert the common beginning before each stretch of a tensor [N, ...] of the pass."""
        if not any(bundle.shared[1] for bundle in self.bundles):
            return x
        lengths, _ = self.stretches
        # One `split` has one backward pass; a slice per stretch would make a gradient of N tokens per slice.
        pieces = dict(zip(accumulate(lengths, initial=0), x.split(lengths), strict=False))
        parts, start = [], 0
        for bundle in self.bundles:
            first, last = bundle.shared
            for length in bundle.lengths:
                parts += [pieces[first]] * (last > first) + [pieces[start]]
                start += length
        return torch.cat(parts)

    def once(self, make: Callable[..., Made], *arguments: Any) -> Made:
        """Return `make(*arguments)`, computed once for all layers of the pass."""
        key = (make, *arguments)
        if key not in self._made:
            self._made[key] = make(*arguments)
        made: Made = self._made[key]
        return made


def num_needed(is_asked: torch.Tensor) -> list[int]:
    """Return how many tokens of each row must be computed: all before the last requested token."""
    return torch.where(is_asked, torch.arange(is_asked.shape[1]), 0).amax(dim=1).tolist()


def num_shared(input_ids: torch.Tensor, needed: Sequence[int]) -> int:
    """Return the length of the common beginning of all rows [B, T], within the `needed` tokens of each row."""
    if len(needed) < 2:
        return 0
    beginning = input_ids[:, : min(needed)]
    return int((beginning == beginning[0]).all(dim=0).cumprod(0).sum())


def pack(rows: Rows, context: ContextGroup | None = None, whole: Sequence[int] = ()) -> Packing:
    """Lay out the tokens that must be computed, at least one: all common beginnings, then the rests of the rows.

    The ranks of a `context` call this with the same rows. Rows in `whole` are computed to their ends.
    """
    needed = num_needed(rows.is_asked)
    for row in whole:
        needed[row] = int(rows.attention_mask[row].sum())
    if not any(needed):
        needed[0] = 1
    places = torch.zeros_like(rows.input_ids)
    order: list[tuple[int, int, int]] = []
    members_of: list[list[int]] = []
    bundles: list[Bundle] = []

    def lay(stretches: list[tuple[list[int], int, int]], shared: tuple[int, int] = (0, 0)) -> None:
        """Append stretches (rows, start, end), the longest first."""
        stretches.sort(key=lambda stretch: stretch[1] - stretch[2])
        for lengths in alike([last - first for _, first, last in stretches]):
            bundles.append(Bundle(bundles[-1].end if bundles else 0, lengths, shared))
        start = bundles[-1].end - sum(last - first for _, first, last in stretches)
        for members, first, last in stretches:
            places[members, first:last] = torch.arange(start, start + last - first)
            order.append((members[0], first, last))
            members_of.append(members)
            start += last - first

    used = [row for row in range(len(needed)) if needed[row]]
    beginnings, endings = [], []
    images = [()] * len(needed) if rows.images is None else rows.images
    # Rows with equal tokens may have different pictures.
    for _, neighbours in groupby(used, key=lambda row: (rows.groups[row], images[row])):
        members = list(neighbours)
        shared = num_shared(rows.input_ids[members], [needed[row] for row in members])
        if shared:
            beginnings.append((members, 0, shared))
            endings.append([([row], shared, needed[row]) for row in members if needed[row] > shared])
        else:
            beginnings += [([row], 0, needed[row]) for row in members]
    lay(beginnings)
    for stretches in filter(None, endings):
        # The common beginning of the group has one place in the pass.
        (row, *_), shared, _ = stretches[0]
        start = int(places[row, 0])
        lay(stretches, (start, start + shared))
    input_ids = torch.cat([rows.input_ids[row, first:last] for row, first, last in order])
    position_ids = torch.cat([torch.arange(first, last) for _, first, last in order])
    before = places.roll(1, dims=1)[rows.is_asked]
    return Packing(input_ids[None], position_ids[None], before, bundles, context, order, members_of)


def alike(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut a falling sequence of lengths into parts wherever padding would cost more than another part."""
    parts: list[list[int]] = []
    for length in lengths:
        if parts and (len(parts[-1]) + 1) * parts[-1][0] <= MOST_PADDED * (sum(parts[-1]) + length) + SPARE:
            parts[-1].append(length)
        else:
            parts.append([length])
    return [tuple(part) for part in parts]
