"""The rollouts of a step: sampled, scored, and filtered by dynamic sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from vectorlm.rl.conversation import GroupSampler
from vectorlm.rl.prompts import PromptOrder
from vectorlm.rl.rollout import Rollout, RolloutGroup, kept_groups
from vectorlm.train.recorder import Timer
from vectorlm.types import Completion, Engine, PromptRecord


class RolloutSource(Protocol):
    """Where the rollouts of a step come from; its calls are collective."""

    @property
    def group_size(self) -> int:
        """Return G."""
        ...

    def collect(self, step: int, timer: Timer) -> list[RolloutGroup]:
        """Return the scored rollouts of `step`, while the engine holds the weights of that step."""
        ...

    def metrics(self, step: int) -> dict[str, float]:
        """Describe what is still in flight while the ranks train on the rollouts of `step`."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned."""
        ...


class Scorer(Protocol):
    """Gives rollouts their rewards; its calls are collective, with the same result on all ranks."""

    def score(self, groups: Sequence[Sequence[Rollout]], greedy: Sequence[Rollout]) -> list[RolloutGroup]:
        """Score the rollouts of some prompts, and a greedy completion of each, or of none."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolloutCollector:
    """Samples and scores the rollouts of a step while nothing else happens; its calls are collective."""

    engine: Engine
    sampler: GroupSampler
    prompts: PromptOrder[PromptRecord]
    scorer: Scorer
    needs_greedy: bool = False
    """Sample and score a greedy completion of each prompt too."""
    drops_constant_groups: bool = False
    """Dynamic sampling (DAPO): drop groups of equal rewards, which teach nothing, and sample others instead."""
    replay: PromptOrder[list[Rollout]] | None = None
    """Stored groups of an earlier run."""
    replayed_share: float = 0.0
    """Share of the groups of each round that come from `replay`."""

    @property
    def group_size(self) -> int:
        """Return G."""
        return self.sampler.settings.group_size

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        replay_position = 0 if self.replay is None else self.replay.position
        return {"position": self.prompts.position, "replay_position": replay_position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned."""
        self.prompts.position = state["position"]
        if self.replay is not None:
            self.replay.position = state["replay_position"]

    def metrics(self, step: int) -> dict[str, float]:
        """Return nothing: no request is in flight while the ranks train."""
        return {}

    def collect(self, step: int, timer: Timer) -> list[RolloutGroup]:
        """Return the rollouts of `step`, dropped groups included; `timer` records sampling and scoring.

        Raises:
            RewardError: A reward function failed, and the run is set to stop then.
            RolloutError: An environment failed.
        """
        num_groups = self.sampler.settings.prompts_per_step
        groups: list[RolloutGroup] = []
        for _ in range(self.sampler.settings.max_sampling_rounds if self.drops_constant_groups else 1):
            groups += self._round(num_groups - len(kept_groups(groups)), timer)
            if len(kept_groups(groups)) == num_groups:
                break
        return groups

    def _round(self, count: int, timer: Timer) -> list[RolloutGroup]:
        num_replayed = 0 if self.replay is None else round(count * self.replayed_share)
        with timer.span("time/generate_s"):
            groups = self._sample(count - num_replayed)
            if self.replay is not None:
                groups += self.replay.take(num_replayed)
            greedy = []
            if self.needs_greedy:
                prompt_records = [group[0].prompt_record for group in groups]
                answers = self.engine.sample(*self.sampler.greedy_request(prompt_records))
                greedy = greedy_rollouts(prompt_records, answers)
        with timer.span("time/score_s"):
            return self.score(groups, greedy)

    def _sample(self, count: int) -> list[list[Rollout]]:
        """Sample a group for each of the next prompts."""
        conversation = self.sampler.begin(self.prompts.take(count), self.prompts.position - count)
        if not count:
            return []
        while (request := conversation.next_request()) is not None:
            conversation.receive(self.engine.sample(*request))
        return conversation.groups

    def score(
        self, groups: Sequence[Sequence[Rollout]], greedy: Sequence[Rollout] = ()
    ) -> list[RolloutGroup]:
        """Score groups, and the greedy completion of each where the algorithm needs one."""
        scored = self.scorer.score(groups, greedy)
        settings = self.sampler.settings
        if settings.overlong_buffer_tokens:
            scored = [replace(each, rewards=each.rewards - self._overlong(each.rollouts)) for each in scored]
            for index, rollout in enumerate(greedy):
                reward = scored[index].greedy_reward
                assert reward is not None
                scored[index] = replace(scored[index], greedy_reward=reward - self._overlong([rollout])[0])
        if self.drops_constant_groups:
            scored = [replace(each, is_dropped=each.is_constant) for each in scored]
        return scored

    def _overlong(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Return the length penalty of each rollout, float32 [G].

        Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
        """
        settings = self.sampler.settings
        lengths = torch.tensor([each.num_policy_tokens for each in rollouts])
        beyond = lengths - (settings.sampling["max_tokens"] - settings.overlong_buffer_tokens)
        return settings.overlong_penalty * (beyond / settings.overlong_buffer_tokens).clamp(0.0, 1.0)


def greedy_rollouts(
    prompt_records: Sequence[PromptRecord], answers: Sequence[Sequence[Completion]]
) -> list[Rollout]:
    """Make rollouts of the answers to `GroupSampler.greedy_request`."""
    return [Rollout.begun(record, answer) for record, (answer,) in zip(prompt_records, answers, strict=True)]
