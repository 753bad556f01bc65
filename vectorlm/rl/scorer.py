"""What rollouts are worth: every reward function and the reward model, shared out over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from vectorlm.errors import RewardError
from vectorlm.ranks.topology import Topology
from vectorlm.rewards.runner import Outcome, Scorable, run_reward
from vectorlm.rollout.rollout import Rollout

RewardModel = Callable[[Sequence[Rollout]], list[float]]
"""Scores all rollouts, on all ranks together."""


@dataclass(frozen=True)
class Scored:
    """What a list of rollouts was worth."""

    total: torch.Tensor
    """float32 [N], the weighted sum; NaN where nothing could be said, or a function failed."""
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """float32 [N] of each function; NaN where it said nothing."""
    num_errors: int = 0
    """Calls that raised or ran out of time."""
    first_error: str | None = None
    """The first of them, with its prompt."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Runs the rewards; its calls are collective, and the result the same on all ranks."""

    functions: Mapping[str, Callable[..., Any]]
    """By the name that metrics call them; see `vectorlm.rewards.runner` for their forms."""
    weights: Mapping[str, float]
    """Of each function, and of the model."""
    models: Mapping[str, RewardModel] = field(default_factory=dict)
    """Reward models, by name."""
    timeout_s: float | None = None
    """Longest call of a function, in seconds."""
    on_error: Literal["stop", "skip"] = "stop"
    """What a function that raises or runs out of time does to the run; a skipped completion has no reward."""
    topology: Topology

    def score(self, rollouts: Sequence[Rollout]) -> Scored:
        """Score rollouts.

        Raises:
            RewardError: A function raised or ran out of time, and `on_error` is ``stop``; on all ranks.
        """
        outcomes = self._run_functions(rollouts)
        parts = {
            name: torch.tensor([each.reward for each in found], dtype=torch.float32)
            for name, found in outcomes.items()
        }
        parts |= {
            name: torch.tensor(model(rollouts), dtype=torch.float32) for name, model in self.models.items()
        }
        failures = [
            (name, rollout, each.error)
            for name, found in outcomes.items()
            for rollout, each in zip(rollouts, found, strict=True)
            if each.error is not None
        ]
        first = _describe(*failures[0]) if failures else None
        if first is not None and self.on_error == "stop":
            raise RewardError(f"{first}. Mend the function, or set rl.on_reward_error: skip.")
        has_failed = torch.zeros(len(rollouts), dtype=torch.bool)
        for found in outcomes.values():
            has_failed |= torch.tensor([each.error is not None for each in found], dtype=torch.bool)
        return Scored(self._total(parts, has_failed), parts, len(failures), first)

    def _run_functions(self, rollouts: Sequence[Rollout]) -> dict[str, list[Outcome]]:
        """Let every rank score a share, so that a random or slow function is called once for each completion.

        The completions of one question stay together: a function of a batch may compare them.
        """
        blocks = _blocks(rollouts, self.topology.world_size)
        first, last = blocks[self.topology.rank]
        mine = rollouts[first:last]
        items = [
            Scorable(each.text, each.question.prompt, each.token_ids, each.question.columns) for each in mine
        ]
        shares: list[Any] = [
            {name: run_reward(function, items, self.timeout_s) for name, function in self.functions.items()}
        ]
        if self.topology.world_size > 1:
            here = shares[0]
            shares = [None] * self.topology.world_size
            dist.all_gather_object(shares, here)
        return {name: [each for share in shares for each in share[name]] for name in self.functions}

    def _total(self, parts: Mapping[str, torch.Tensor], has_failed: torch.Tensor) -> torch.Tensor:
        """Add up what was said; a function that said nothing has no part in the sum."""
        weighted = torch.stack([self.weights[name] * values for name, values in parts.items()])
        said_nothing = weighted.isnan().all(dim=0) | has_failed
        return weighted.nansum(dim=0).masked_fill(said_nothing, math.nan)


def _blocks(rollouts: Sequence[Rollout], count: int) -> list[tuple[int, int]]:
    """Cut rollouts into `count` blocks of about equal size, never between two of the same question."""
    starts = [
        index
        for index, rollout in enumerate(rollouts)
        if index == 0 or rollout.question is not rollouts[index - 1].question
    ]
    cuts = [starts[len(starts) * rank // count] if starts else 0 for rank in range(count)]
    return list(zip(cuts, [*cuts[1:], len(rollouts)], strict=True))


def _describe(name: str, rollout: Rollout, error: str | None) -> str:
    return (
        f"the reward {name!r} failed: {error} (prompt {str(rollout.question.prompt)[:80]!r}, "
        f"completion {rollout.text[:80]!r})"
    )
