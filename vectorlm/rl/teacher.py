"""The teacher of on-policy distillation: what it says of the tokens that the policy chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from vectorlm.algorithms.batch import RolloutBatch
from vectorlm.algorithms.kl import generalised_jsd
from vectorlm.algorithms.logprobs import Comparison
from vectorlm.ranks.engine_ranks import capture, gather, results_or_first_error
from vectorlm.ranks.topology import Topology
from vectorlm.rl.micro_batch import RowFunction
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.packing import Rows, num_needed

AllRows = Callable[[RolloutBatch, RowFunction], torch.Tensor]
"""Applies a model to every row of a batch, as `vectorlm.rl.micro_batch.map_rows` does."""
ScoreTokens = Callable[[Sequence[Sequence[int]]], list[list[float]]]
"""From rows of token ids to the log-probability of each token."""


def beside(policy: LanguageModel, model: nn.Module) -> LanguageModel:
    """Return what computes a frozen model's rows as the policy's are: of all tokens, at the policy's temperature."""
    return LanguageModel(
        model, policy.temperature, packs=policy.packs, device=policy.device, context=policy.context
    )


class Teacher:
    """A frozen model that is sharded like the policy, at the policy's temperature."""

    def __init__(self, policy: LanguageModel, model: nn.Module) -> None:
        """Take a sharded model with as many logits as the policy."""
        self.model: nn.Module | None = model
        self._frozen = beside(policy, model)
        self.why_padded = self._frozen.why_padded
        """Why its rows are padded; None where they are not."""

    def logprobs(self, batch: RolloutBatch, all_rows: AllRows) -> torch.Tensor:
        """Return the log-probability of each token that the policy chose, float32 [B, T] on the CPU."""
        return all_rows(batch, self._frozen.logprobs)

    def comparison(self, rows: Rows, beta: float) -> Comparison:
        """Compute rows, and return what compares the policy's distributions of their tokens with the teacher's.

        Its two numbers of each token are the divergence to learn from, with gradient, and KL(policy || teacher).
        """
        scores = self._frozen.scores(rows)

        def compare(places: slice, logprobs: torch.Tensor) -> torch.Tensor:
            teacher = scores.logprobs(places)
            divergence = generalised_jsd(logprobs, teacher, beta)
            reverse = divergence if beta == 1 else generalised_jsd(logprobs.detach(), teacher, 1.0)
            return torch.stack([divergence, reverse.detach()], dim=-1)

        return compare


class ServerTeacher:
    """A teacher behind a server, which returns only the log-probabilities of the sampled tokens."""

    model: nn.Module | None = None
    why_padded: str | None = None

    def __init__(self, score: ScoreTokens, topology: Topology) -> None:
        """Take what asks the server."""
        self._score, self._topology = score, topology

    def logprobs(self, batch: RolloutBatch, all_rows: AllRows) -> torch.Tensor:
        """Return the log-probability of each token that the policy chose, float32 [B, T] on the CPU.

        Each rank asks for a share of the rows, up to the last token that is trained on. What one rank's server call
        raises, all ranks raise.
        """
        ends = {row: count + 1 for row, count in enumerate(num_needed(batch.mask)) if count}
        rows = list(ends)[self._topology.rank :: self._topology.world_size]
        asked = [batch.input_ids[row, : ends[row]].tolist() for row in rows]
        mine: Any = capture(lambda: dict(zip(rows, self._score(asked), strict=True)))
        by_rank = gather(self._topology, mine)
        found = torch.zeros(batch.input_ids.shape)
        for answers in results_or_first_error(by_rank):
            for row, values in answers.items():
                found[row, : len(values)] = torch.tensor(values)
        return found
