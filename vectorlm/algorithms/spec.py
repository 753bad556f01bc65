"""An algorithm as a row of data: the functions that the loop calls, and what they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vectorlm.algorithms.batch import LossInputs, RolloutBatch
from vectorlm.algorithms.groups import is_constant
from vectorlm.algorithms.settings import AlgorithmSettings, ClipSettings, TokenSettings

LossUnit = Literal["token", "completion", "group"]
# The second argument is the settings, of the class that a function needs.
AdvantageFunction = Callable[[RolloutBatch, Any], torch.Tensor]
"""Returns float [B, T], detached and 0 outside the mask; the batch has no rewards but those of valid completions."""
LossFunction = Callable[[LossInputs, Any], torch.Tensor]
"""Returns float [B, T] per token, [B] per completion or [B / K] per group, as the spec's `level` says."""
MarkFunction = Callable[[RolloutBatch, torch.Tensor, Any], torch.Tensor]
"""From a batch and its advantages to the tokens that `loss` treats differently, bool [B, T]."""
ObserveFunction = Callable[[LossInputs, Any], Mapping[str, torch.Tensor]]
"""Returns metrics by name, float [B] per completion, or [B / K] per group where `level` is ``group``."""
Selection = tuple[torch.Tensor, torch.Tensor]
"""Columns int64 [P, K], indices into each group; and bool [P, K], which of them are valid."""
SelectionFunction = Callable[[torch.Tensor, torch.Tensor], Selection]
"""From rewards float [P, G], NaN for a completion that could not be scored, and eligible bool [P, G]."""


def keep_all(rewards: torch.Tensor, valid: torch.Tensor) -> Selection:
    """Select every completion, K = G; valid are the eligible ones with a reward."""
    num_groups, group_size = rewards.shape
    columns = torch.arange(group_size, device=rewards.device).expand(num_groups, group_size)
    return columns, valid & ~rewards.isnan()


def keep_unscored(rewards: torch.Tensor, valid: torch.Tensor) -> Selection:
    """Select every completion, K = G; valid are the eligible ones, also without a reward."""
    return keep_all(rewards, valid)[0], valid


def keep_best(rewards: torch.Tensor, valid: torch.Tensor) -> Selection:
    """Select the completion with the highest reward, the first of equals; K = 1."""
    kept = valid & ~rewards.isnan()
    best = torch.where(kept, rewards, -torch.inf).argmax(dim=1, keepdim=True)
    return best, kept.gather(1, best)


def keep_best_and_worst(rewards: torch.Tensor, valid: torch.Tensor) -> Selection:
    """Select the completions with the highest and the lowest reward; K = 2, and equal rewards are not valid."""
    kept = valid & ~rewards.isnan()
    best = torch.where(kept, rewards, -torch.inf).argmax(dim=1, keepdim=True)
    worst = torch.where(kept, rewards, torch.inf).argmin(dim=1, keepdim=True)
    columns = torch.cat([best, worst], dim=1)
    return columns, (~is_constant(rewards, kept)).expand(-1, 2)


def observe_nothing(inputs: LossInputs, hparams: AlgorithmSettings) -> Mapping[str, torch.Tensor]:
    """Return no metrics."""
    return {}


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """One algorithm; the loop reads these fields and never the name."""

    name: str
    """The name in configs."""
    advantages: AdvantageFunction
    """Computes the advantage of each token."""
    loss: LossFunction
    """Computes the loss to minimise."""
    level: LossUnit = "token"
    """The unit that `loss` returns one value for; over completions and groups the mean is taken."""
    select: SelectionFunction = keep_all
    """Which completions of a group are trained on."""
    needs_critic: bool = False
    """Whether advantages are computed from a critic's values; it learns advantages + values, so only
    `whiten_advantages` may normalise them."""
    needs_reference: bool = False
    """Whether the loss reads the reference's log-probabilities; a KL penalty loads a reference by itself."""
    needs_greedy: bool = False
    """Whether a greedy completion of each prompt is sampled and scored too."""
    needs_teacher: bool = False
    """Whether it learns from `rl.teacher` alone; rewards, if there are any, are measured and not learned from."""
    needs_parts: bool = False
    """Whether advantages are computed from each reward alone, and not from their sum."""
    sums_turns: bool = False
    """Whether advantages are computed from the sum of a rollout's rewards, also where its turns have their own."""
    needs_old: bool = False
    """Whether advantages or `mark` read the batch's `old_logprobs`."""
    needs_gradient_norms: bool = False
    """Whether advantages read the batch's `gradient_norms`."""
    reads_weights: bool = False
    """Whether the loss reads the correction's weights as `log_weights`, in place of being multiplied by them."""
    mark: MarkFunction | None = None
    """Chooses tokens over the whole batch, before its first optimizer step."""
    has_ratio: bool = False
    """Whether the loss weighs tokens by the ratio of the policy to `old_logprobs`."""
    clips: Literal["token", "sum"] | None = None
    """Which ratio is clipped, for the metrics: of a token (or by the mean of its completion's log-ratios, as
    `importance_sampling_level` says), or of a completion by their sum; None where no clip keeps a token from learning.
    """
    samples_from_policy: bool = True
    """Whether completions must be drawn from the policy itself, so that penalties and the like are refused."""
    observe: ObserveFunction = observe_nothing
    """Computes metrics of this algorithm, logged as means over completions or groups."""
    min_group_size: int = 1
    """Smallest number of completions per prompt for which the algorithm is defined."""
    min_completions: int = 1
    """Smallest number of completions per step for which it is."""
    settings: AlgorithmSettings = field(default_factory=TokenSettings)
    """Where the algorithm starts, and by its class which settings it has under ``rl``; a config's values win."""
    source: str = ""
    """Author, year and identifier of the paper."""

    def __post_init__(self) -> None:
        if self.clips is not None and not isinstance(self.settings, ClipSettings):
            raise ValueError(
                f"the algorithm {self.name!r} has clips={self.clips!r}, and its settings no bounds: their class must "
                "extend ClipSettings."
            )

    def rows_per_loss(self, group_size: int) -> int:
        """Return how many completions must be in one micro-batch: a whole group, for losses of groups."""
        if self.level != "group":
            return 1
        rewards = torch.zeros(1, group_size)
        return self.select(rewards, torch.ones_like(rewards, dtype=torch.bool))[0].shape[1]

    @property
    def learns_from_turns(self) -> bool:
        """Whether rollouts of equal rewards teach something where rewards of their turns differ."""
        return self.level == "token" and not (self.chooses or self.sums_turns)

    @property
    def chooses(self) -> bool:
        """Whether only some completions of a group are trained on."""
        return self.select not in (keep_all, keep_unscored)
