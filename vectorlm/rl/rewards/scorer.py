"""Score groups of rollouts with the reward functions and reward models, split over the ranks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch

from vectorlm.algorithms.groups import join_equal
from vectorlm.errors import RewardError
from vectorlm.ranks.engine_ranks import capture, gather, results_or_first_error
from vectorlm.ranks.topology import Topology
from vectorlm.ranks.workers.pool import WorkerPool, together
from vectorlm.rl.rewards.function import RewardFunction, shown
from vectorlm.rl.rewards.runner import Reward
from vectorlm.rl.rollout import Rollout, RolloutGroup
from vectorlm.rl.rollouts.sampler import SampledGroup
from vectorlm.rl.settings import CollectSettings
from vectorlm.types import ENVIRONMENT, RewardResult

RewardModel = Callable[[Sequence[Rollout]], list[float]]
"""Scores all rollouts, on all ranks together."""


@dataclass(frozen=True, kw_only=True)
class RewardScorer:
    """Runs the rewards; its calls are collective, and the result is the same on all ranks."""

    functions: Mapping[str, Reward]
    """By the name that metrics call them; see `vectorlm.rl.rewards.runner` for their forms."""
    weights: Mapping[str, float]
    """The weight of each function and model in the sum, and of what environments give where `ENVIRONMENT` counts."""
    of_source: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The weights of the rewards that count for the prompts of one source; for those of other sources all count."""
    models: Mapping[str, RewardModel] = field(default_factory=dict)
    pool: WorkerPool | None = None
    """What runs this rank's share of the calls; None runs them in the rank."""
    timeout_s: float | None = None
    """Longest call of a function, in seconds."""
    on_error: Literal["stop", "skip"] = "stop"
    """What happens when a function raises or runs out of time; a skipped completion has no reward."""
    topology: Topology

    def __post_init__(self) -> None:
        # Made now: the pool's thread and the rank's own ask for them.
        _ = self._reward_functions

    async def score_group(self, rollouts: Sequence[Rollout]) -> dict[str, list[RewardResult]]:
        """Score completions of one prompt with the functions that see one at a time; the workers are this rank's.

        May be awaited on any event loop. Functions of lists see all groups of a step together, and are left to `score`.

        Raises:
            RewardError: A function failed, where `on_error` is ``stop``: a run does not wait for its other groups, of
                which each may hang as long.
        """
        if self.pool is None:
            return {}
        unscored = [RewardResult(math.nan)] * len(rollouts)
        items = [shown(each) for each in rollouts]
        counting = self._weights(rollouts[0])

        async def score() -> list[list[RewardResult] | None]:
            return await together(
                self._reward_functions[name].score_alone(items) for name in self.functions if name in counting
            )

        found = iter(await asyncio.wrap_future(self.pool.submit(score())))
        by_name = {name: next(found) if name in counting else unscored for name in self.functions}
        known = {name: results for name, results in by_name.items() if results is not None}
        for name, results in known.items():
            for rollout, result in zip(rollouts, results, strict=True):
                self._error_of(name, rollout, result)
        return known

    def _error_of(self, name: str, rollout: Rollout, result: RewardResult) -> str | None:
        """Return what failed, if anything did; raise it where `on_error` is ``stop``."""
        if result.error is None:
            return None
        text = f"the reward {name!r} failed: {shown(rollout).failure(result.error)}"
        if self.on_error == "stop":
            raise RewardError(f"{text}. Correct the function, or set rl.on_reward_error: skip.")
        return text

    def score(
        self,
        groups: Sequence[Sequence[Rollout]],
        greedy: Sequence[Rollout] = (),
        results: Sequence[Mapping[str, Sequence[RewardResult]]] = (),
    ) -> list[RolloutGroup]:
        """Score the rollouts of some prompts, and a greedy completion of each, or of none.

        `results` are those of `score_group`, of each group with its greedy completion. A function that fails raises
        `RewardError` on all ranks where `on_error` is ``stop``.
        """
        rollouts = [rollout for group in groups for rollout in group] + list(greedy)
        sizes = [len(group) for group in groups]
        early = {
            name: [
                *(each for one, size in zip(results, sizes, strict=True) for each in one[name][:size]),
                *(each[name][-1] for each in results if greedy),
            ]
            for name in self.functions
            if results and all(name in each for each in results)
        }
        late = [name for name in self.functions if name not in early]
        both = early | self._run_functions(late, rollouts, [*sizes, *(1 for _ in greedy)])
        returned = {name: both[name] for name in self.functions}
        numbers = {name: [each.reward for each in found] for name, found in returned.items()}
        numbers |= {name: model(rollouts) for name, model in self.models.items()}
        numbers.setdefault(ENVIRONMENT, [math.fsum(each.turn_rewards) for each in rollouts])
        rewards = {name: torch.tensor(found, dtype=torch.float32) for name, found in numbers.items()}
        owners = [index for index, group in enumerate(groups) for _ in group] + list(range(len(greedy)))
        errors: list[list[str]] = [[] for _ in groups]
        has_failed = torch.zeros(len(rollouts), dtype=torch.bool)
        for name, found in returned.items():
            for index, (rollout, result) in enumerate(zip(rollouts, found, strict=True)):
                if text := self._error_of(name, rollout, result):
                    if result.is_counted:
                        errors[owners[index]].append(text)
                    has_failed[index] = True
        # A reward that is NaN is left out of the sum, and a sum of nothing but NaN is NaN. Where none counts, it is 0.
        weights = [self._weights(rollout) for rollout in rollouts]
        weighted = torch.stack(
            [
                torch.tensor([each.get(name, math.nan) for each in weights]) * values
                for name, values in rewards.items()
            ]
        )
        is_unscored = weighted.isnan().all(dim=0) & torch.tensor(list(map(bool, weights)))
        total = weighted.nansum(dim=0).masked_fill(is_unscored | has_failed, math.nan)
        greedy_rewards = total[sum(sizes) :] if greedy else [None] * len(groups)
        ends = list(accumulate(sizes))
        return [
            RolloutGroup(
                group,
                total[end - len(group) : end],
                {
                    name: rewards[name][end - len(group) : end]
                    for name in rewards
                    if name in self._weights(group[0])
                },
                greedy_rewards[index],
                tuple(errors[index]),
                reward_weights=self._weights(group[0]),
                logged=tuple(
                    {
                        **rollouts[place].measured,
                        **{
                            name: value
                            for found in returned.values()
                            for name, value in found[place].logged.items()
                        },
                    }
                    for place in range(end - len(group), end)
                ),
            )
            for index, (group, end) in enumerate(zip(groups, ends, strict=True))
        ]

    def _run_functions(
        self, names: Sequence[str], rollouts: Sequence[Rollout], sizes: Sequence[int]
    ) -> dict[str, list[RewardResult]]:
        """Let every rank score some rollouts, so that a random or slow function is called once for each completion.

        Groups, of these sizes, stay together: a batch function may compare their completions.
        """
        if not names:
            return {}
        # Not by the prompts: two groups may have one, which is one object on the rank that sampled them, else two.
        ends, rank = [0, *accumulate(sizes)], self.topology.rank
        first, last = (ends[len(sizes) * each // self.topology.world_size] for each in (rank, rank + 1))
        here = rollouts[first:last]

        def score(name: str) -> list[RewardResult]:
            found = [RewardResult(math.nan)] * len(here)
            places = [place for place, each in enumerate(here) if name in self._weights(each)]
            results = self._reward_functions[name].score([shown(here[place]) for place in places])
            for place, result in zip(places, results, strict=True):
                found[place] = result
            return found

        by_rank = results_or_first_error(
            gather(self.topology, capture(lambda: {name: score(name) for name in names}))
        )
        return {name: [each for found in by_rank for each in found[name]] for name in names}

    def _weights(self, rollout: Rollout) -> Mapping[str, float]:
        """Return the weight of each reward that counts for a completion."""
        return self.of_source.get(rollout.prompt_record.source, self.weights)

    @cached_property
    def _reward_functions(self) -> dict[str, RewardFunction]:
        stops = self.on_error == "stop"
        return {
            name: RewardFunction(each, self.pool, timeout_s=self.timeout_s, stops_at_error=stops)
            for name, each in self.functions.items()
        }


@dataclass(frozen=True, kw_only=True)
class GroupScorer:
    """Scores groups as the settings say; its calls are collective."""

    scorer: RewardScorer
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
