"""A sum over the bits of a tensor that adds up over shards and notices moved rows."""

from __future__ import annotations

import math

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
    if rows.numel() == 0:
        return 0
    table = rows.detach().contiguous().reshape(rows.shape[0] if rows.ndim else 1, -1)
    word = _WORDS[word_bytes or widest_word(table.shape[1] * table.element_size())]
    # Torch adds integers of any width in 64 bits.
    sums = table.view(word).sum(dim=1)
    weights = 2 * torch.arange(first_row, first_row + len(sums), device=sums.device) + 1
    return int((sums * weights).sum().item()) % 2**64


def widest_word(*lengths_bytes: int) -> int:
    """Return the size in bytes of the widest word that divides every one of the lengths."""
    return math.gcd(max(_WORDS), *lengths_bytes)
