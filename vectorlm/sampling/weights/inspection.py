"""Checks before weights are sent: ranks agree, all numbers are finite; and the checksum that proves an update."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch

from vectorlm.errors import NonFiniteWeights, RankMismatch
from vectorlm.sampling.weights.plan import shortened


@dataclass(frozen=True)
class Inspection:
    """A rank's findings about its weights before an update sends them."""

    sums: Mapping[str, tuple[tuple[int, ...], int]]
    """By tensor: the place of the rank's first element, by dimension, and the checksum of the rank's elements; empty
    without checksums."""
    not_finite: tuple[str, ...]
    """Tensors with a number that is not finite, or not finite in the engine's dtype."""
    groups: Mapping[str, Sequence[str]] | None = None
    """Groups of tensors: ranks with the same place of one tensor have the same places of all. None if unknown."""

    def digest(self) -> Digest | None:
        """Return hashes of what the ranks compare; None without `groups`."""
        if self.groups is None and self.sums:
            return None
        hashes = {}
        for group, names in (self.groups or {}).items():
            places, totals = zip(*map(self.sums.__getitem__, names), strict=True)
            hashes[group] = _hash([*chain.from_iterable(places)]), _hash(totals)
        return Digest(self.not_finite, hashes)


def _hash(numbers: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.array(numbers, np.uint64).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class Digest:
    """The part of an `Inspection` that ranks exchange; equal digests of the same rows mean equal rows."""

    not_finite: tuple[str, ...]
    """As in `Inspection`."""
    by_group: Mapping[str, tuple[bytes, bytes]]
    """By group of tensors that are distributed alike: hashes of the places and of the checksums."""


def ranks_agree(digests: Sequence[Digest | None]) -> bool:
    """Return whether all weights are finite, and ranks with the same rows have the same checksums.

    False if a rank's digest is unknown.
    """
    seen: dict[tuple[str, bytes], bytes] = {}
    same = (
        seen.setdefault((group, place), total) == total
        for digest in digests
        if digest is not None
        for group, (place, total) in digest.by_group.items()
    )
    return all(same) and not any(digest is None or digest.not_finite for digest in digests)


def require_sound(inspections: Sequence[Inspection]) -> None:
    """Raise if a rank's weights are not finite or ranks differ; `inspections` are of one weight set, by rank."""
    if wrong := sorted({name for found in inspections for name in found.not_finite}):
        ranks = [rank for rank, found in enumerate(inspections) if found.not_finite]
        raise NonFiniteWeights(
            f"{len(wrong)} tensors contain NaN, infinity or numbers beyond the engine's dtype: {shortened(wrong)} "
            f"(rank {ranks[0]}). No weight of the engine has changed. Check the loss and the learning rate; "
            "check_finite=False sends the tensors anyway."
        )
    ranks_by_sum: dict[Any, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, found in enumerate(inspections):
        for name, (place, total) in found.sums.items():
            ranks_by_sum[name, place][total].append(rank)
    if differ := {name: ranks for (name, _), ranks in ranks_by_sum.items() if len(ranks) > 1}:
        first, second, *_ = (ranks[0] for ranks in next(iter(differ.values())).values())
        raise RankMismatch(
            f"ranks {first} and {second} have different values in the same rows of {len(differ)} tensors: "
            f"{shortened([*differ])}. The engine's weights have not changed. Shard the model with fully_shard, or "
            "give every rank the same weights and the same gradients (DistributedDataParallel)."
        )


@dataclass(frozen=True)
class Reading:
    """One tensor to read."""

    rows: torch.Tensor
    """Any dtype and shape; rows along dimension 0."""
    first_row: int
    """Index of the first of these rows in the whole tensor."""
    word_bytes: int = 0
    """Size of a word of the checksum; 0 for the widest."""
    sent: torch.dtype | None = None
    """A second dtype: the rows are summed in it too, and must be finite in it. None for no second dtype."""
    sent_word_bytes: int = 0
    """Size of a word of the second checksum."""


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def checksum(rows: torch.Tensor, first_row: int = 0, word_bytes: int = 0) -> int:
    r"""Sum the bit patterns of `rows`, each row weighted by its place in the whole tensor.

    :math:`\sum_i (2i + 1) \sum_j \mathrm{word}_{ij} \bmod 2^{64}` with :math:`i` the row in the whole tensor and the
    row's bytes read as integers. The sums of disjoint shards, and of pieces of rows if no word is cut, add up to the
    sum of the whole. The weights are odd, and therefore no change of a single word, in any bit, vanishes modulo
    :math:`2^{64}`. Swapped rows change the sum, but words swapped within a row do not. It reads memory once.

    Args:
        rows: Any dtype, any shape; rows along dimension 0. A scalar is one row.
        first_row: Where `rows` start in the whole tensor.
        word_bytes: Size of a word: 8, 4, 2 or 1; the widest that divides a row when omitted. All parts of one tensor
            need the same size.

    Returns:
        A number in [0, 2**64).
    """
    return checksums([(row_sums(rows, word_bytes), first_row)])[0]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8 [N]: NaN is equal to itself there, and 0 is not -0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def words_of(rows: torch.Tensor, word_bytes: int = 0) -> torch.Tensor:
    """Return the bytes of `rows` as integers of `word_bytes` (0: the widest that divides a row), [rows, words].

    The result is a view if the rows are contiguous.
    """
    if rows.numel() == 0:
        return torch.empty(0, 1, dtype=torch.int64, device=rows.device)
    table = rows.detach().contiguous().reshape(rows.shape[0] if rows.ndim else 1, -1)
    return table.view(_WORDS[word_bytes or widest_word(table.shape[1] * table.element_size())])


def row_sums(rows: torch.Tensor, word_bytes: int = 0) -> torch.Tensor:
    """Return the sum of the words of each row of `rows`, int64; `checksums` makes checksums of them."""
    # Torch adds integers of any width in 64 bits.
    return words_of(rows, word_bytes).sum(dim=1)


def checksums(sums: Sequence[tuple[torch.Tensor, int]]) -> list[int]:
    """Return the checksum of each tensor, given its `row_sums` and where its rows start in the whole tensor.

    It handles all tensors together, because one call per tensor would take as long as reading their memory. Two running
    sums over the rows of all tensors suffice: of the row sums, and of the row sums times the index of the row.
    """
    if not sums:
        return []
    # Integers of 64 bits wrap, and differences of sums that have wrapped are right modulo 2**64.
    device = sums[0][0].device
    together = torch.cat(
        [torch.zeros(1, dtype=torch.int64, device=device), *(rows.to(device) for rows, _ in sums)]
    )
    ends = list(accumulate((len(rows) for rows, _ in sums), initial=0))
    at = torch.tensor(ends, device=device)
    plain = together.cumsum(0)[at].tolist()
    placed = together.mul_(torch.arange(len(together), device=device)).cumsum_(0)[at].tolist()
    return [
        (2 * (after - before) + (2 * (first_row - end) - 1) * (plain_after - plain_before)) % 2**64
        for (_, first_row), end, (before, after), (plain_before, plain_after) in zip(
            sums, ends, pairwise(placed), pairwise(plain), strict=False
        )
    ]


def widest_word(*lengths_bytes: int) -> int:
    """Return the size in bytes of the widest word that divides every one of the lengths."""
    return math.gcd(max(_WORDS), *lengths_bytes)
