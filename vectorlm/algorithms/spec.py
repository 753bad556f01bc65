"""The record that describes one algorithm: the functions that the loop calls, and their needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vectorlm.algorithms.settings import AlgorithmSettings, ClipSettings, TokenSettings

if TYPE_CHECKING:
    # Code that reads a config imports this module, and must not import torch.
    import torch

    from vectorlm.algorithms.batch import LossInputs, RolloutBatch

    Selection = tuple[torch.Tensor, torch.Tensor]

ComparedRewards = Literal["sums", "returns", "turns"]
"""Rewards that dynamic sampling compares: the sums of rollouts, the returns from the same turn on, or the rewards of
the same turns."""


def keep_all(rewards: torch.Tensor, valid: torch.Tensor) -> Selection:
    """Select every completion, K = G; the `valid` ones with a reward count."""
    import torch

    columns = torch.arange(rewards.shape[1], device=rewards.device).expand_as(rewards)
    return columns, valid & ~rewards.isnan()


def keep_unscored(rewards: torch.Tensor, valid: torch.Tensor) -> Selection:
    """Select every completion, K = G; the `valid` ones count, with or without a reward."""
    return keep_all(rewards, valid)[0], valid


def keep_best(rewards: torch.Tensor, valid: torch.Tensor) -> Selection:
    """Select the completion with the highest reward, the first of equals; K = 1."""
    kept = valid & ~rewards.isnan()
    best = rewards.masked_fill(~kept, -math.inf).argmax(dim=1, keepdim=True)
    return best, kept.gather(1, best)


def keep_best_and_worst(rewards: torch.Tensor, valid: torch.Tensor) -> Selection:
    """Select the completions with the highest and the lowest reward; K = 2. Equal rewards do not count."""
    import torch

    from vectorlm.algorithms.groups import is_constant

    kept = valid & ~rewards.isnan()
    best = rewards.masked_fill(~kept, -math.inf).argmax(dim=1, keepdim=True)
    worst = rewards.masked_fill(~kept, math.inf).argmin(dim=1, keepdim=True)
    return torch.cat([best, worst], dim=1), (~is_constant(rewards, kept)).expand(-1, 2)


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """An algorithm. The loop reads these fields and never the name.

    The last argument of `advantages`, `loss`, `mark` and `observe` is `settings` with the values of the config.
    """

    name: str
    """Name in configs."""
    advantages: Callable[[RolloutBatch, Any], torch.Tensor]
    """Computes the advantage of each token, float [B, T], detached and 0 outside the mask. Rewards of completions that
    are not valid are NaN."""
    loss: Callable[[LossInputs, Any], torch.Tensor]
    """Computes the loss to minimise: float [B, T], [B] or [B / K], see `level`."""
    level: Literal["token", "completion", "group"] = "token"
    """Whether `loss` returns a value per token, per completion or per group; the latter two are averaged."""
    scales_with_advantage: bool = False
    """Whether loss and gradient of a completion are 0 if all its advantages are 0. The update then skips the forward
    passes of groups without any advantage."""
    select: Callable[[torch.Tensor, torch.Tensor], Selection] = keep_all
    """Chooses the completions that are trained on. It takes their rewards, float [P, G] or NaN, and whether they are
    eligible, bool [P, G]. It returns indices into each group, int64 [P, K], and whether they are valid, bool [P, K]."""
    needs_critic: bool = False
    """Whether advantages are computed from a critic's values. The critic learns advantages + values. Therefore only
    `whiten_advantages` may normalise the advantages."""
    needs_reference: bool = False
    """Whether the loss reads the reference's log-probabilities. (A KL penalty loads the reference by itself.)"""
    needs_greedy: bool = False
    """Whether the engine also samples a greedy completion of each prompt, to be scored."""
    needs_teacher: bool = False
    """Whether the algorithm learns only from `rl.teacher`. Rewards are then only logged."""
    needs_parts: bool = False
    """Whether advantages are computed from each reward, not from their sum."""
    sums_turns: bool = False
    """Whether advantages are computed from the sum of a rollout's rewards even if turns have their own rewards."""
    needs_old: bool = False
    """Whether `advantages` or `mark` read the batch's `old_logprobs`."""
    needs_gradient_norms: bool = False
    """Whether `advantages` reads the batch's `gradient_norms`."""
    reads_weights: bool = False
    """Whether the loss reads the correction's weights as `log_weights`, instead of being multiplied by them."""
    mark: Callable[[RolloutBatch, torch.Tensor, Any], torch.Tensor] | None = None
    """Chooses the tokens that `loss` treats differently, bool [B, T], from the whole batch and its advantages. Called
    before the first optimizer step."""
    has_ratio: bool = False
    """Whether the loss weighs tokens by the ratio of the policy to `old_logprobs`."""
    clips: Literal["token", "sum"] | None = None
    """The ratio that the loss clips, for the metrics: ``token``, at the `importance_sampling_level`; or ``sum``, the
    product of a completion's ratios. None if no clip stops a token from learning."""
    samples_from_policy: bool = True
    """Whether completions must be sampled from the policy itself. Sampling penalties are then refused."""
    observe: Callable[[LossInputs, Any], Mapping[str, torch.Tensor]] = lambda inputs, hparams: {}
    """Computes metrics by name, float [B] per completion or, if `level` is ``group``, [B / K]. Their mean is logged."""
    min_group_size: int = 1
    """Smallest number of completions per prompt for which the algorithm is defined."""
    min_completions: int = 1
    """Smallest number of completions per step for which the algorithm is defined."""
    settings: AlgorithmSettings = field(default_factory=TokenSettings)
    """Initial values of the algorithm's settings. Their class decides which keys ``rl`` has in a config."""
    source: str = ""
    """Author, year and identifier of the paper."""

    def __post_init__(self) -> None:
        if self.clips is not None and not isinstance(self.settings, ClipSettings):
            raise ValueError(
                f"clips={self.clips!r} needs settings with bounds, and {type(self.settings).__name__} of the algorithm "
                f"{self.name!r} has none. Extend ClipSettings."
            )

    def rows_per_loss(self, group_size: int) -> int:
        """Return how many completions must be in the same micro-batch: 1, or K for a loss with one value per group."""
        if self.level != "group":
            return 1
        import torch

        rewards = torch.zeros(1, group_size)
        return self.select(rewards, torch.ones_like(rewards, dtype=torch.bool))[0].shape[1]

    @property
    def compared(self) -> ComparedRewards:
        """The rewards of rollouts that must differ for dynamic sampling to keep a group."""
        if self.level != "token" or self.chooses or self.sums_turns:
            return "sums"
        # A critic's values and a baseline of each position differ even between turns with equal returns.
        return "turns" if self.needs_critic or self.needs_gradient_norms else "returns"

    @property
    def chooses(self) -> bool:
        """Whether only some completions of a group are trained on."""
        return self.select not in (keep_all, keep_unscored)
