"""A sum over the bits of a tensor that adds up over shards and notices moved rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def checksum(rows: torch.Tensor, first_row: int = 0, word_bytes: int = 0) -> int:
    r"""Sum the bit patterns of `rows`, each row weighted by its place in the whole tensor.

    :math:`\sum_i (2i + 1) \sum_j \mathrm{word}_{ij} \bmod 2^{64}` with :math:`i` the row in the whole tensor and the
    row's bytes read as integers. The sums of disjoint shards, and of pieces of rows if no word is cut, add up to the
    sum of the whole. The weights are odd, so that no change of a single word, in any bit, can vanish modulo
    :math:`2^{64}`; rows that changed places show too, words swapped within a row do not. It reads memory once.

    Args:
        rows: Any dtype, any shape; rows along dimension 0. A scalar is one row.
        first_row: Where `rows` start in the whole tensor.
        word_bytes: Size of a word: 8, 4, 2 or 1; the widest that divides a row when omitted. All who sum parts of one
            tensor must use the same.

    Returns:
        A number in [0, 2**64).
    """
    return checksums([(row_sums(rows, word_bytes), first_row)])[0]


def row_sums(rows: torch.Tensor, word_bytes: int = 0) -> torch.Tensor:
    """Return the sum of the words of each row of `rows`, int64; `checksums` makes checksums of them."""
    if rows.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=rows.device)
    table = rows.detach().contiguous().reshape(rows.shape[0] if rows.ndim else 1, -1)
    word = _WORDS[word_bytes or widest_word(table.shape[1] * table.element_size())]
    # Torch adds integers of any width in 64 bits.
    return table.view(word).sum(dim=1)


def checksums(sums: Sequence[tuple[torch.Tensor, int]]) -> list[int]:
    """Return the checksum of each tensor, given its `row_sums` and where its rows start in the whole tensor.

    All at once: a call for each of a model's tensors would take as long as reading their memory. Two running sums, of
    what the rows of all tensors sum to and of that times the row's place among them all, hold the answer for each.
    """
    if not sums:
        return []
    # Integers of 64 bits wrap, and differences of what has wrapped are right modulo 2**64.
    device = sums[0][0].device
    together = torch.cat(
        [torch.zeros(1, dtype=torch.int64, device=device), *(each.to(device) for each, _ in sums)]
    )
    ends = list(accumulate((len(each) for each, _ in sums), initial=0))
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
