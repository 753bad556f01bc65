"""Texts of a dataset that the policy learns in the same optimizer steps as its own completions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from vectorlm.rl.settings import SFTSettings
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.objective import BatchLoader, NextTokens, known_rows
from vectorlm.types import Batch

LUFFY_GAMMA = 0.1
"""What shapes probabilities in LUFFY (Yan et al. 2025, arXiv:2504.14945)."""


@dataclass(frozen=True)
class Demonstrations:
    """The texts of each optimizer step, and their share of its loss.

    Which texts a step has follows from its place in the run alone, so a checkpoint holds nothing of them.
    """

    policy: LanguageModel
    loader: BatchLoader
    settings: SFTSettings
    num_batches: int
    """Batches of rollouts in the run."""

    def share(self, batch: int) -> float:
        """Return the weight of the texts' loss at a batch of rollouts; that of the completions' is 1 less this."""
        start, end = self.settings.share, self.settings.share_at_end
        if end is None:
            return start
        return start + (end - start) * batch / max(self.num_batches - 1, 1)

    def micro_batches(self, index: int) -> tuple[list[Batch], int]:
        """Return this rank's texts for optimizer step `index` of the run, and the target tokens of all ranks."""
        epoch, step = divmod(index, len(self.loader))
        objective = NextTokens(self.policy)
        batches = list(objective.prepare(next(self.loader.steps(epoch, start_step=step))))
        count = torch.stack([objective.num_counted(each) for each in batches]).sum().to(self.policy.device)
        dist.all_reduce(count)
        return batches, max(int(count) // self.policy.shared_by, 1)

    def loss(self, batch: Batch, num_tokens: int) -> torch.Tensor:
        """Return the loss of a micro-batch, as a share of the mean over the `num_tokens` of the whole step.

        With the probability p of a target token, its loss is by `weighting`

            none   -log p
            chord  -p (1 - p) log p, where the factor has no gradient (Zhang et al. 2025, arXiv:2508.11408)
            luffy  -p / (p + 0.1)

        Raises:
            DatasetError: A token is not in the model's vocabulary.
        """
        rows = known_rows(batch, self.policy.model, NextTokens.ignore_index)
        logprobs = self.policy.logprobs(rows)
        if self.settings.weighting == "none":
            return -logprobs.sum() / num_tokens
        probabilities = logprobs.exp()
        if self.settings.weighting == "chord":
            factor = (probabilities * (1 - probabilities)).detach()
            return -(factor * logprobs).sum() / num_tokens
        shaped = probabilities / (probabilities + LUFFY_GAMMA)
        return -(shaped * rows.is_asked.to(shaped.device)).sum() / num_tokens
