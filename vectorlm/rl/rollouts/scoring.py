"""The rewards of sampled groups: the sum of all rewards, penalties for length, and which groups teach nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from vectorlm.algorithms.groups import join_equal
from vectorlm.rl.rollout import Rollout, RolloutGroup
from vectorlm.rl.rollouts.sampler import Results, SampledGroup
from vectorlm.rl.settings import CollectSettings


class Scorer(Protocol):
    """Gives rollouts their rewards; its calls are collective, with the same result on all ranks."""

    def score(
        self, groups: Sequence[Sequence[Rollout]], greedy: Sequence[Rollout], results: Sequence[Results]
    ) -> list[RolloutGroup]:
        """Score the rollouts of some prompts, and a greedy completion of each, or of none.

        `results` are what some functions have returned for each group already.
        """


@dataclass(frozen=True, kw_only=True)
class GroupScorer:
    """Scores groups as the settings say; its calls are collective."""

    scorer: Scorer
    settings: CollectSettings
    drops_constant_groups: bool = False
    """Dynamic sampling (DAPO): drop groups of equal rewards, which teach nothing."""
    by_turn: bool = True
    """Whether a group of equal sums teaches something where rewards of turns differ."""

    def score(self, groups: Sequence[SampledGroup]) -> list[RolloutGroup]:
        """Score groups together: a reward function may want to see many.

        Raises:
            RewardError: A reward function failed, and the run is set to stop then.
        """
        greedy = [group.greedy for group in groups if group.greedy is not None]
        scored = self.scorer.score(
            [group.rollouts for group in groups], greedy, [group.results for group in groups]
        )
        has_penalty = self.settings.overlong_buffer_tokens > 0 or self.settings.missing_end_penalty > 0
        for index, group in enumerate(scored):
            addends = [weight * group.rewards_by_name[name] for name, weight in group.reward_weights.items()]
            rewards, greedy_reward = group.rewards, group.greedy_reward
            if has_penalty:
                addends.append(-self._penalty(group.rollouts))
                rewards = rewards + addends[-1]
                if greedy_reward is not None:
                    greedy_reward = greedy_reward - self._penalty([greedy[index]])[0]
            if len(addends) > 1:
                rewards = join_equal(rewards, torch.stack(addends))
            scored[index] = replace(group, rewards=rewards, greedy_reward=greedy_reward)
        if self.drops_constant_groups:
            scored = [
                replace(each, is_dropped=each.is_constant if self.by_turn else each.has_equal_sums)
                for each in scored
            ]
        return scored

    def _penalty(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Return what each rollout loses for its length, and for not having ended, float32 [G].

        Source of the first: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
        """
        settings = self.settings
        found = settings.missing_end_penalty * torch.tensor([float(each.is_truncated) for each in rollouts])
        if settings.overlong_buffer_tokens:
            lengths = torch.tensor([each.num_policy_tokens for each in rollouts])
            beyond = lengths - (settings.sampling["max_tokens"] - settings.overlong_buffer_tokens)
            found += settings.overlong_penalty * (beyond / settings.overlong_buffer_tokens).clamp(0.0, 1.0)
        return found
