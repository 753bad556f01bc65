"""Objectives of pairs: what a reward model learns of two completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vectorlm.algorithms.preference import bradley_terry_loss
from vectorlm.train.objective import apart, known_rows
from vectorlm.train.scorer import Scorer
from vectorlm.types import Batch

NAMES = ("pair_accuracy", "pair_margin", "chosen_reward", "rejected_reward")
"""Of pairs: how often the chosen text has the higher reward, by how much in the mean, and the means of both."""


@dataclass(frozen=True)
class RewardPairs:
    """The Bradley-Terry loss of a reward model's scores."""

    scorer: Scorer
    center_coef: float = 0.0
    ignore_index: int = -100
    """Label of tokens outside the loss."""
    counts = "pair"
    names = NAMES

    @property
    def why_padded(self) -> str | None:
        """Why rows are padded; None where they are not."""
        return self.scorer.why_padded

    def prepare(self, step: Sequence[Batch]) -> list[Batch]:
        """Make each text a row of its own."""
        return [apart(batch, self.ignore_index) for batch in step]

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the pairs."""
        return (batch.ids >= 0).sum() // 2

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of the pairs, and the sums of `names`."""
        scores = self.scorer(known_rows(batch, self.scorer.model, self.ignore_index))
        chosen, rejected = in_pairs(scores, batch)
        assert batch.values is not None
        margins = batch.values[: len(chosen)].to(chosen.device)
        loss = bradley_terry_loss(chosen, rejected, margins, self.center_coef)
        return loss.sum(), measured(chosen, rejected)


def in_pairs(values: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return the values of first texts and of second ones, [P] each; rows that fill up a batch come last."""
    return values[: int((batch.ids >= 0).sum())].unflatten(0, (-1, 2)).unbind(1)


def measured(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return the sums of `NAMES` over pairs with these rewards, and what they are divided by, float64 [4, 2]."""
    chosen, rejected = chosen.detach().double(), rejected.detach().double()
    sums = [(chosen > rejected).sum(), (chosen - rejected).sum(), chosen.sum(), rejected.sum()]
    found = torch.stack([each.double() for each in sums])
    return torch.stack([found, torch.full_like(found, len(chosen))], dim=1)
