"""One step's rollouts: sampled, scored, and chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from vectorlm.algorithms.groups import is_constant
from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.data.questions import Question
from vectorlm.rl.scorer import Scorer
from vectorlm.rollout.batch import RolloutBatch, make_batch
from vectorlm.rollout.collect import Collector
from vectorlm.rollout.prompts import PromptOrder
from vectorlm.rollout.replay import Replay
from vectorlm.rollout.rollout import Rollout
from vectorlm.telemetry.timers import Timer


@dataclass(frozen=True)
class Gathered:
    """The groups of a step, before any model but the engine's has seen them."""

    groups: list[list[Rollout]]
    """P groups of G rollouts."""
    rewards: torch.Tensor
    """float32 [P, G], penalties for length included; NaN where a rollout could not be scored."""
    parts: Mapping[str, torch.Tensor]
    """float32 [P, G] of each reward function alone."""
    greedy_rewards: torch.Tensor | None
    """float32 [P], for algorithms that need them."""
    num_sampled_groups: int
    """Groups that were sampled, those that dynamic sampling dropped included."""
    num_errors: int
    """Calls of reward functions that raised or ran out of time."""
    first_error: str | None
    """The first of them."""
    sampled: Gathered | None = None
    """Everything that was sampled, where dynamic sampling dropped groups; None where it is this itself."""

    def split(self) -> list[Gathered]:
        """Return each group by itself; errors are those of the first."""
        return [
            Gathered(
                [group],
                self.rewards[index : index + 1],
                {name: values[index : index + 1] for name, values in self.parts.items()},
                None if self.greedy_rewards is None else self.greedy_rewards[index : index + 1],
                1,
                self.num_errors if index == 0 else 0,
                self.first_error if index == 0 else None,
            )
            for index, group in enumerate(self.groups)
        ]

    def chosen(self, spec: AlgorithmSpec, pad_token_id: int, drop_truncated: bool) -> RolloutBatch | None:
        """Return the rows that the algorithm trains on; None where nothing of them is to be learned from."""
        if not self.groups:
            return None
        eligible = torch.ones_like(self.rewards, dtype=torch.bool)
        if drop_truncated and spec.chooses:
            # What would be left out of the loss must not be chosen, nor be half of a pair.
            eligible = torch.tensor([[not each.is_truncated for each in group] for group in self.groups])
        selection = spec.select(self.rewards, eligible)
        groups = [
            [group[column] for column in columns]
            for group, columns in zip(self.groups, selection.columns.tolist(), strict=True)
        ]
        batch = make_batch(
            groups,
            self.rewards.gather(1, selection.columns),
            selection,
            pad_token_id,
            drop_truncated=drop_truncated,
        )
        return batch if batch.mask.any() else None


class Source(Protocol):
    """Where the rollouts of a step come from; its calls are collective."""

    @property
    def group_size(self) -> int:
        """G."""
        ...

    def gather(self, step: int, timer: Timer) -> Gathered:
        """Return the rollouts of `step`, whose weights the engine holds."""
        ...

    def metrics(self, step: int) -> dict[str, float]:
        """Describe what goes on while the ranks train on what `gather` returned."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        ...


@dataclass(frozen=True, kw_only=True)
class Gatherer:
    """Samples and scores the rollouts of a step while nothing else goes on; its calls are collective."""

    collector: Collector
    order: PromptOrder[Question]
    scorer: Scorer
    num_groups: int
    """P."""
    needs_greedy: bool = False
    """Whether a greedy completion of each prompt is scored too."""
    drops_constant_groups: bool = False
    """Dynamic sampling (DAPO): a group of equal rewards teaches nothing, and another one is sampled in its place."""
    max_rounds: int = 1
    """Rounds of sampling with dynamic sampling; what is missing then stays missing."""
    max_tokens: int | None = None
    """Longest completion, for the penalty below."""
    overlong_buffer: int = 0
    """Tokens before `max_tokens` over which the penalty grows; 0 leaves it out."""
    overlong_penalty: float = 1.0
    """What a completion of `max_tokens` tokens loses (DAPO)."""
    replay: Replay | None = None
    """Stored groups."""
    replayed_share: float = 0.0
    """Share of the groups of each round that come from there."""

    @property
    def group_size(self) -> int:
        """G."""
        return self.collector.group_size

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {
            "position": self.order.position,
            "replay_position": 0 if self.replay is None else self.replay.position,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.order.position = state["position"]
        if self.replay is not None:
            self.replay.position = state["replay_position"]

    def metrics(self, step: int) -> dict[str, float]:
        """Describe what goes on while the ranks train: nothing."""
        return {}

    def gather(self, step: int, timer: Timer) -> Gathered:
        """Return the rollouts of `step`; `timer` learns how long sampling and scoring took.

        Raises:
            RewardError: A reward function failed, and that is to stop the run.
        """
        if not self.drops_constant_groups:
            return self._round(self.num_groups, timer)
        sampled, kept = [], []
        missing = self.num_groups
        for _ in range(self.max_rounds):
            sampled.append(self._round(missing, timer))
            kept.append(self.with_differences(sampled[-1]))
            missing -= len(kept[-1].groups)
            if not missing:
                break
        return replace(join(kept), sampled=join(sampled))

    def _round(self, count: int, timer: Timer) -> Gathered:
        num_replayed = 0 if self.replay is None else round(count * self.replayed_share)
        position, fresh = self.order.position, self.order.take(count - num_replayed)
        with timer.span("time/generate_s"):
            groups = self.collector.collect(fresh, position) if fresh else []
            if self.replay is not None:
                groups += self.replay.take(num_replayed)
            questions = [group[0].question for group in groups]
            greedy = self.collector.greedy(questions) if self.needs_greedy else []
        with timer.span("time/score_s"):
            return self.scored(groups, greedy)

    def scored(self, groups: list[list[Rollout]], greedy: list[Rollout]) -> Gathered:
        """Score some groups, and the greedy completion of each where the algorithm needs one."""
        count, size = len(groups), self.group_size
        scored = self.scorer.score([rollout for group in groups for rollout in group] + greedy)
        num_rollouts = count * size
        rewards = scored.total[:num_rollouts].view(count, size) - self._overlong(groups)
        parts = {name: values[:num_rollouts].view(count, size) for name, values in scored.parts.items()}
        greedy_rewards = None
        if self.needs_greedy:
            greedy_rewards = scored.total[num_rollouts:] - self._overlong([greedy])[0]
        return Gathered(
            groups, rewards, parts, greedy_rewards, len(groups), scored.num_errors, scored.first_error
        )

    def _overlong(self, groups: Sequence[Sequence[Rollout]]) -> torch.Tensor:
        """Return what each completion loses for its length, float32 [P, G].

        Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
        """
        lengths = torch.tensor([[each.num_policy_tokens for each in group] for group in groups])
        if not self.overlong_buffer or self.max_tokens is None:
            return torch.zeros(lengths.shape)
        beyond = lengths - (self.max_tokens - self.overlong_buffer)
        return self.overlong_penalty * (beyond / self.overlong_buffer).clamp(0.0, 1.0)

    def with_differences(self, gathered: Gathered) -> Gathered:
        """Return the groups whose rewards are not all the same."""
        kept = ~is_constant(gathered.rewards, ~gathered.rewards.isnan())[:, 0]
        return replace(
            gathered,
            groups=[group for group, is_kept in zip(gathered.groups, kept.tolist(), strict=True) if is_kept],
            rewards=gathered.rewards[kept],
            parts={name: values[kept] for name, values in gathered.parts.items()},
            greedy_rewards=None if gathered.greedy_rewards is None else gathered.greedy_rewards[kept],
        )


def join(found: Sequence[Gathered]) -> Gathered:
    """Put rollouts that were gathered one after the other into one."""
    if len(found) == 1:
        return found[0]
    return Gathered(
        [group for each in found for group in each.groups],
        torch.cat([each.rewards for each in found]),
        {name: torch.cat([each.parts[name] for each in found]) for name in found[0].parts},
        None
        if found[0].greedy_rewards is None
        else torch.cat([each.greedy_rewards for each in found if each.greedy_rewards is not None]),
        sum(each.num_sampled_groups for each in found),
        sum(each.num_errors for each in found),
        next((each.first_error for each in found if each.first_error is not None), None),
    )
