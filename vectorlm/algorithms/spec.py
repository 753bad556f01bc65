"""An algorithm as a row of data: which functions the one loop calls, and what they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from vectorlm.algorithms.preference import Kind as PreferenceKind
from vectorlm.algorithms.reduce import How
from vectorlm.algorithms.selection import Selection, keep_all


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The numbers that the functions of an algorithm read."""

    gamma: float = 1.0
    """Discount per token of `gae_advantages`."""
    lam: float = 1.0
    """Lambda of `gae_advantages`."""
    clip_low: float = 0.2
    """The ratio of policies is clipped to at least 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio of policies is clipped to at most 1 + clip_high."""
    dual_clip: float | None = None
    """Bound of the loss where the advantage is negative; see `ppo_policy_loss`."""
    temperature_positive: float = 1.0
    """SAPO's tau where the advantage is positive."""
    temperature_negative: float = 1.05
    """SAPO's tau elsewhere."""
    beta: float = 0.1
    """How little a preference loss or CoPG lets the policy leave the reference."""
    label_smoothing: float = 0.0
    """Share of pairs that `online_dpo_loss` takes to be the wrong way round."""
    preference: PreferenceKind = "sigmoid"
    """The loss of `online_dpo_loss`."""


@dataclass(frozen=True)
class Scores:
    """What advantages are made of; B = P K rows, those of a group next to each other."""

    rewards: torch.Tensor
    """float [P, K], less the KL penalty where that is part of the reward; NaN where a completion was not scored."""
    valid: torch.Tensor
    """bool [P, K]; a completion that is not valid has no part in baselines or losses."""
    token_rewards: torch.Tensor
    """float [B, T]: the reward at the last token of each completion, less the KL penalty at each token."""
    mask: torch.Tensor
    """bool [B, T], the tokens that the policy chose."""
    values: torch.Tensor | None
    """float [B, T] of the critic, for algorithms that need one."""
    greedy_rewards: torch.Tensor | None
    """float [P] of a greedy completion, for algorithms that need one."""

    def spread(self, advantages: torch.Tensor) -> torch.Tensor:
        """Give each token the advantage of its completion: [P, K] to [B, T]."""
        return torch.where(self.mask, advantages.reshape(-1, 1), 0.0)


@dataclass(frozen=True)
class LossInputs:
    """What a loss is made of; B rows of a micro-batch, those of a group next to each other."""

    policy_logprobs: torch.Tensor
    """float [B, T], with gradient."""
    old_logprobs: torch.Tensor
    """float [B, T], the trainer's own at the weights of the rollout."""
    reference_logprobs: torch.Tensor | None
    """float [B, T], for algorithms and penalties that need them."""
    advantages: torch.Tensor
    """float [B, T]."""
    rewards: torch.Tensor
    """float [B], of whole completions."""
    mask: torch.Tensor
    """bool [B, T], the tokens that the policy chose; all False in a row that is not valid."""
    rows_per_group: int
    """K: how many rows each group has."""


AdvantageFunction = Callable[[Scores, Knobs], torch.Tensor]
"""Returns float [B, T], detached and 0 outside the mask."""
LossFunction = Callable[[LossInputs, Knobs], torch.Tensor]
"""Returns float [B, T] per token, [B] per completion or [B / K] per group, as the spec's `level` says."""
ObserveFunction = Callable[[LossInputs, Knobs], Mapping[str, torch.Tensor]]
"""Returns metrics by name, float [B] per completion, or [B / K] per group where `level` is ``group``."""
SelectionFunction = Callable[[torch.Tensor, torch.Tensor], Selection]


def observe_nothing(inputs: LossInputs, knobs: Knobs) -> Mapping[str, torch.Tensor]:
    """Return no metrics."""
    return {}


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """One algorithm; the loop reads this row and never the name."""

    name: str
    """What configs call it."""
    advantages: AdvantageFunction
    """What each token is worth."""
    loss: LossFunction
    """What is minimised."""
    level: Literal["token", "completion", "group"] = "token"
    """What `loss` returns one value of; of completions and groups the mean is taken."""
    reduction: How = "token_mean"
    """How losses of tokens become one number."""
    select: SelectionFunction = keep_all
    """Which completions of a group are trained on."""
    needs_critic: bool = False
    """Whether advantages are made with a critic's values."""
    needs_reference: bool = False
    """Whether the loss itself reads the reference's log-probabilities; a KL penalty asks for them by itself."""
    needs_greedy: bool = False
    """Whether a greedy completion of each prompt is sampled and scored besides."""
    has_ratio: bool = False
    """Whether the loss itself weighs tokens by the ratio of the policy to `old_logprobs`."""
    clips: Literal["token", "mean", "sum"] | None = None
    """Whose ratio is clipped, for the metrics: each token's, or of a completion's log-ratios the mean or the sum; None
    where no ratio keeps a token from learning."""
    samples_from_policy: bool = True
    """Whether the loss is right only for completions drawn from the policy itself, so that sampling may not be cut."""
    observe: ObserveFunction = observe_nothing
    """Metrics of its own; their means over completions or groups are logged. For losses of tokens there are none."""
    min_group_size: int = 1
    """Completions per prompt below which the algorithm makes no sense."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the algorithm starts from, of the numbers in `Knobs`, ``whiten_advantages`` and ``dynamic_sampling``; a
    config's own win."""
    source: str = ""
    """Where it comes from."""

    def __post_init__(self) -> None:
        """Refuse settings that nothing would read."""
        known = {each.name for each in fields(Knobs)} | {"whiten_advantages", "dynamic_sampling"}
        unknown = sorted(self.settings.keys() - known)
        if unknown:
            raise ValueError(
                f"the algorithm {self.name!r} has settings that it cannot start from: {', '.join(unknown)}. They may "
                f"be {', '.join(sorted(known))}; the rest belongs into configs."
            )

    def rows_per_loss(self, group_size: int) -> int:
        """Return how many completions must meet in one micro-batch: those of a group, for losses of groups."""
        if self.level != "group":
            return 1
        rewards = torch.zeros(1, group_size)
        return self.select(rewards, torch.ones_like(rewards, dtype=torch.bool)).columns.shape[1]

    @property
    def chooses(self) -> bool:
        """Whether only some completions of a group are trained on."""
        return self.select is not keep_all
