"""Objectives of preference data: what a reward model or a policy learns of rows of two texts, or of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from vectorlm.algorithms.preference import (
    KTO_BETA,
    PairLogprobs,
    PreferenceSpec,
    bradley_terry_loss,
    kto_loss,
)
from vectorlm.algorithms.settings import PreferenceSettings
from vectorlm.sampling.weights.model_tensors import reshard
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.objective import BatchLoader, Scorer, apart, known_rows
from vectorlm.types import Batch

NAMES = ("pair_accuracy", "pair_margin", "chosen_reward", "rejected_reward")
"""Of pairs: how often the chosen text has the higher reward, by how much in the mean, and the means of both."""


class Pairs:
    """What objectives of pairs have in common."""

    counts = "pair"
    names = NAMES
    ignore_index: int
    """Label of tokens outside the loss."""

    def prepare(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Make each text a row of its own."""
        return (apart(batch, self.ignore_index) for batch in batches)

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the pairs."""
        return (batch.ids >= 0).sum() // 2


@dataclass(frozen=True)
class RewardPairs(Pairs):
    """The Bradley-Terry loss of a reward model's scores."""

    scorer: Scorer
    center_coef: float = 0.0
    ignore_index: int = -100

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of the pairs, and the sums of `names`."""
        scores = self.scorer(known_rows(batch, self.scorer.model, self.ignore_index))
        chosen, rejected = in_pairs(scores, batch)
        assert batch.values is not None
        margins = batch.values[: len(chosen)].to(chosen.device)
        loss = bradley_terry_loss(chosen, rejected, margins, self.center_coef)
        return loss.sum(), measured(chosen, rejected)


@dataclass(frozen=True)
class Steps:
    """The binary cross-entropy of a reward model's score at the end of each step, whose label is 1 or 0.

    Source: Lightman et al. 2023, arXiv:2305.20050 (labels of steps); Wang et al. 2024, arXiv:2312.08935, eq. 2.
    """

    scorer: Scorer
    ignore_index: int = -100
    """Label of tokens that end no step."""
    counts = "step"
    names = ("step_accuracy", "step_brier", "step_bias", "right_probability", "wrong_probability")
    """How often the likelier label is the given one; of the probability that a step is right the mean squared error and
    the mean error, and its means over right and over wrong steps."""

    def prepare(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Take the batches as they are."""
        return batches

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the steps."""
        return (batch.labels != self.ignore_index).sum()

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of the steps, and the sums of `names`."""
        is_end = batch.labels != self.ignore_index
        scores = self.scorer(known_rows(batch, self.scorer.model, self.ignore_index), is_end)
        labels = batch.labels[is_end].to(scores)
        loss = F.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
        found, right = scores.detach().double().sigmoid(), labels.double()
        gap = found - right
        values = torch.stack(
            [(gap.abs() < 0.5).double(), gap.square(), gap, found * right, found * (1 - right)]
        )
        weights = torch.stack([torch.ones_like(right)] * 3 + [right, 1 - right])
        return loss, torch.stack([values.sum(dim=1), weights.sum(dim=1)], dim=1)


@dataclass(frozen=True)
class Completions:
    """What objectives of a policy have in common: log-probabilities of the completions of both texts of a row."""

    language_model: LanguageModel
    averages: bool
    """Whether these are divided by the number of tokens."""
    ignore_index: int = -100
    """Label of tokens that belong to no completion."""

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return float32 [B], of each row of texts that are apart."""
        rows = known_rows(batch, self.language_model.model, self.ignore_index)
        sums = self.language_model.logprobs(rows).sum(dim=1)
        return sums / rows.is_asked.sum(dim=1).clamp(min=1).to(sums) if self.averages else sums

    @torch.no_grad()
    def table(self, loader: BatchLoader, num_rows: int) -> torch.Tensor:
        """Return what the model says of both texts of each row of a dataset, float32 [N, 2] on the CPU of all ranks."""
        model = self.language_model.model
        found = torch.zeros(num_rows, 2, device=self.language_model.device)
        model.eval()
        for step in loader.steps(0):
            for batch in step:
                texts = apart(batch, self.ignore_index)
                both = torch.stack(in_pairs(self.logprobs(texts), texts), dim=1)
                found[batch.ids[batch.ids >= 0].to(found.device)] = both
        model.train()
        reshard(model)
        # Each row was computed by one rank, or by all that share it.
        dist.all_reduce(found)
        return found.cpu() / self.language_model.shared_by


@dataclass(frozen=True)
class PreferencePairs(Pairs):
    """A loss of the log-probabilities of pairs: DPO and the like."""

    completions: Completions
    spec: PreferenceSpec
    settings: PreferenceSettings

    @property
    def ignore_index(self) -> int:  # type: ignore[override]
        """Label of tokens that belong to no completion."""
        return self.completions.ignore_index

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of the pairs, and the sums of `names`."""
        chosen, rejected = in_pairs(self.completions.logprobs(batch), batch)
        references = [torch.zeros_like(chosen)] * 2
        if batch.references is not None:
            references = list(batch.references[: len(chosen)].to(chosen.device).unbind(1))
        beta = self.settings.beta or self.spec.beta
        loss = self.spec.loss(PairLogprobs(chosen, rejected, *references), self.settings, beta)
        return loss.sum(), measured(beta * (chosen - references[0]), beta * (rejected - references[1]))


@dataclass
class GoodAndBad:
    """KTO's loss of completions that are good or bad; the second text of a row estimates the KL divergence."""

    completions: Completions
    settings: PreferenceSettings
    _kl: float = 0.0
    counts = "completion"
    names = ("chosen_reward", "rejected_reward", "kl")

    def prepare(self, batches: Iterable[Batch]) -> list[Batch]:
        """Estimate the divergence of all batches together, and leave out the texts that it is estimated from."""
        model = self.completions.language_model.model
        sums = torch.zeros(2, dtype=torch.float64, device=self.completions.language_model.device)
        firsts = []
        for batch in batches:
            texts = apart(batch, self.completions.ignore_index)
            num_rows = int((batch.ids >= 0).sum())
            is_second = (torch.arange(len(texts.ids)) % 2 == 1) & (texts.ids >= 0)
            firsts.append(rows_of(texts, ~is_second))
            # A rank without rows takes part with those that fill up its batch.
            others = rows_of(texts, is_second if num_rows else ~is_second)
            with torch.no_grad():
                logprobs = self.completions.logprobs(others)[:num_rows]
            assert batch.references is not None
            sums[0] += (logprobs - batch.references[:num_rows, 1].to(logprobs)).sum()
            sums[1] += num_rows
        reshard(model)
        dist.all_reduce(sums)
        self._kl = max((sums[0] / sums[1].clamp(min=1)).item(), 0.0)
        return firsts

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the completions."""
        return (batch.ids >= 0).sum()

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of the completions, and the sums of `names`."""
        num_rows = int((batch.ids >= 0).sum())
        logprobs = self.completions.logprobs(batch)[:num_rows]
        assert batch.references is not None
        assert batch.values is not None
        references = batch.references[:num_rows, 0].to(logprobs)
        is_good = batch.values[:num_rows].to(logprobs.device) > 0.5
        beta = self.settings.beta or KTO_BETA
        loss = kto_loss(logprobs, references, is_good, self._kl, self.settings, beta)
        rewards = (beta * (logprobs - references)).detach().double()
        sums = [[rewards[kind].sum().item(), int(kind.sum())] for kind in (is_good, ~is_good)]
        return loss.sum(), torch.tensor([*sums, [self._kl * num_rows, num_rows]], dtype=torch.float64)


def rows_of(batch: Batch, is_kept: torch.Tensor) -> Batch:
    """Return some rows of a batch; what is known of pairs stays as it is."""
    names = ("input_ids", "attention_mask", "labels", "ids", "text_ids")
    return replace(batch, **{name: getattr(batch, name)[is_kept] for name in names})


def in_pairs(values: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return the values of first texts and of second ones, [P] each; rows that fill up a batch come last."""
    return values[: int((batch.ids >= 0).sum())].unflatten(0, (-1, 2)).unbind(1)


def measured(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return the sums of `NAMES` over pairs with these rewards, and what they are divided by, float64 [4, 2]."""
    chosen, rejected = chosen.detach().double(), rejected.detach().double()
    sums = [(chosen > rejected).sum(), (chosen - rejected).sum(), chosen.sum(), rejected.sum()]
    found = torch.stack([each.double() for each in sums])
    return torch.stack([found, torch.full_like(found, len(chosen))], dim=1)
