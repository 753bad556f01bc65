"""Adapters added to a rank's rows of a weight, in float32, without touching the weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LowRank:
    """The rows of ``scaling * left @ right``."""

    left: torch.Tensor
    """[rows, r], the rows that the rank publishes."""
    right: torch.Tensor
    """[r, columns], whole."""
    scaling: float

    def dense(self) -> torch.Tensor:
        """Return the product, float32 [rows, columns]."""
        return self.scaling * (self.left.detach().float() @ self.right.detach().float())


def merge_into(
    delta: LowRank, magnitude: torch.Tensor | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    r"""Return the function that merges an adapter into rows of W.

    It maps :math:`W` to :math:`W + \Delta`, or with DoRA to :math:`m (W + \Delta) / \|W + \Delta\|`.

    Source: Hu et al. 2021, arXiv 2106.09685, eq. 3; Liu et al. 2024, arXiv 2402.09353, eq. 5, with the norm over the
    columns of each row, as a weight of shape [out, in] has its outputs in rows.

    Args:
        delta: What the adapter adds to these rows.
        magnitude: DoRA's m, float [rows].
    """

    def merged(rows: torch.Tensor) -> torch.Tensor:
        total = rows.float() + delta.dense()
        if magnitude is None:
            return total
        return total * (magnitude.detach().float() / torch.linalg.norm(total, dim=1))[:, None]

    return merged


def scale_rows(scaling: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that multiplies rows by `scaling` in float32."""
    return lambda rows: rows.float() * scaling
