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
from vectorlm.algorithms.spec import ComparedRewards
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
"""Scores rollouts; all ranks call it with the same rollouts."""


@dataclass(frozen=True, kw_only=True)
class RewardScorer:
    """The rewards and penalties of a run. All ranks call `score` together and get the same groups."""

    settings: CollectSettings
    functions: Mapping[str, Reward]
    """Reward functions by the name that metrics use; see `vectorlm.rl.rewards.runner` for their forms."""
    weights: Mapping[str, float]
    """Weight of each function and model in the sum; `ENVIRONMENT` is the reward that environments give."""
    of_source: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Weights for the prompts of a source, by source; prompts of other sources use `weights`."""
    models: Mapping[str, RewardModel] = field(default_factory=dict)
    pool: WorkerPool | None = None
    """Workers that run this rank's share of the calls; None runs them in the rank."""
    timeout_s: float | None = None
    """Seconds to wait for a call of a reward function; None waits forever."""
    on_error: Literal["stop", "skip"] = "stop"
    """How to treat a function that raises or times out: stop the run, or leave the completion without a reward."""
    drops_constant_groups: bool = False
    """Whether to drop groups with equal rewards, from which nothing can be learned (dynamic sampling, DAPO)."""
    compared: ComparedRewards = "returns"
    """The rewards that must be equal in a group that is dropped."""
    topology: Topology
    require: Callable[[], None] = lambda: None
    """Raises, before scoring, if the engine lacks an adapter that a judge uses."""

    def __post_init__(self) -> None:
        # Create them now, because both the pool's thread and the rank's main thread read them.
        _ = self._reward_functions

    async def score_group(self, rollouts: Sequence[Rollout]) -> dict[str, list[RewardResult]]:
        """Score completions of one prompt with all functions of a single completion, in this rank's workers.

        You may await it on any event loop. `score` calls the functions of lists, with all groups of a step.

        Raises:
            RewardError: A function failed and `on_error` is ``stop``. The run ends immediately, because other groups
                may hang as long.
        """
        self.require()
        if self.pool is None:
            return {}
        unscored = [RewardResult(math.nan)] * len(rollouts)
        items = [shown(rollout) for rollout in rollouts]
        weights = self._weights(rollouts[0])

        async def score() -> list[list[RewardResult] | None]:
            return await together(
                self._reward_functions[name].score_alone(items) for name in self.functions if name in weights
            )

        found = iter(await asyncio.wrap_future(self.pool.submit(score())))
        by_name = {name: next(found) if name in weights else unscored for name in self.functions}
        known = {name: results for name, results in by_name.items() if results is not None}
        for name, results in known.items():
            for rollout, result in zip(rollouts, results, strict=True):
                self._error_of(name, rollout, result)
        return known

    def _error_of(self, name: str, rollout: Rollout, result: RewardResult) -> str | None:
        """Return the error of a call with its prompt and completion; raise it if `on_error` is ``stop``."""
        if result.error is None:
            return None
        text = f"the reward {name!r} failed: {shown(rollout).failure(result.error)}"
        if self.on_error == "stop":
            raise RewardError(f"{text}. Correct the function, or set rl.on_reward_error: skip.")
        return text

    def score(self, groups: Sequence[SampledGroup]) -> list[RolloutGroup]:
        """Score finished groups together, because functions of lists may compare their completions.

        A group's `results` replace the calls that `score_group` made.

        Raises:
            RewardError: A function failed and `on_error` is ``stop``; all ranks raise it.
        """
        greedy = [group.greedy for group in groups if group.greedy is not None]
        rollouts = [rollout for group in groups for rollout in group.rollouts] + greedy
        results = self._call_functions(groups, rollouts)
        numbers = {name: [result.reward for result in found] for name, found in results.items()}
        numbers |= {name: model(rollouts) for name, model in self.models.items()}
        numbers.setdefault(ENVIRONMENT, [math.fsum(rollout.turn_rewards) for rollout in rollouts])
        rewards = {name: torch.tensor(found, dtype=torch.float32) for name, found in numbers.items()}
        owners = [index for index, group in enumerate(groups) for _ in group.rollouts]
        owners += range(len(greedy))
        # A reward of weight 0 is only measured.
        weights = [self._weights(rollout) for rollout in rollouts]
        counted = [{name: weight for name, weight in given.items() if weight} for given in weights]
        errors: list[list[str]] = [[] for _ in groups]
        has_failed = torch.zeros(len(rollouts), dtype=torch.bool)
        for name, found in results.items():
            for place, (rollout, result) in enumerate(zip(rollouts, found, strict=True)):
                if text := self._error_of(name, rollout, result):
                    if result.is_counted:
                        errors[owners[place]].append(text)
                    has_failed[place] |= name in counted[place]
        # The sum leaves out rewards of NaN. If all rewards are NaN, it is NaN; if no reward counts, it is 0.
        addends = torch.stack(
            [
                torch.tensor([given.get(name, math.nan) for given in counted]) * values
                for name, values in rewards.items()
            ]
        )
        is_unscored = addends.isnan().all(dim=0) & torch.tensor(list(map(bool, counted)))
        total = addends.nansum(dim=0).masked_fill(is_unscored | has_failed, math.nan)
        has_penalty = self.settings.overlong_buffer_tokens > 0 or self.settings.missing_end_penalty > 0
        if has_penalty:
            penalty = self._penalty(rollouts)
            total = total - penalty
            addends = torch.cat([addends, -penalty[None]])
        scored, end = [], 0
        for index, group in enumerate(groups):
            start, end = end, end + len(group.rollouts)
            counting, sums = weights[start], total[start:end]
            if len(counting) + has_penalty > 1:
                sums = join_equal(sums, addends[:, start:end])
            logged = [dict(rollout.measured) for rollout in group.rollouts]
            for found in results.values():
                for values, result in zip(logged, found[start:end], strict=True):
                    values.update(result.logged)
            # Stored rollouts may have rewards of an environment that this run does not have.
            finished = RolloutGroup(
                group.rollouts
                if ENVIRONMENT in counting
                else list(map(_without_turn_rewards, group.rollouts)),
                sums,
                {name: values[start:end] for name, values in rewards.items() if name in counting},
                total[index - len(groups)] if greedy else None,
                tuple(errors[index]),
                reward_weights=counting,
                logged=tuple(logged),
            )
            if self.drops_constant_groups:
                finished = replace(finished, is_dropped=finished.is_constant(self.compared))
            scored.append(finished)
        return scored

    def _call_functions(
        self, groups: Sequence[SampledGroup], rollouts: Sequence[Rollout]
    ) -> dict[str, list[RewardResult]]:
        """Return the results of all functions: the groups' own results, and the results of calls that the ranks share.

        Each function is called only once per completion, because it may be random or slow. Groups stay together; their
        greedy completions follow after all groups.
        """
        sizes = [len(group.rollouts) for group in groups]
        has_greedy = len(rollouts) > sum(sizes)
        early = {
            name: [
                *(result for group in groups for result in group.results[name][: len(group.rollouts)]),
                *(group.results[name][-1] for group in groups if has_greedy),
            ]
            for name in self.functions
            if groups and all(name in group.results for group in groups)
        }
        if not (late := [name for name in self.functions if name not in early]):
            return {name: early[name] for name in self.functions}
        # Ranks split the work by the sizes of groups, because two groups may have the same prompt.
        ends = [0, *accumulate([*sizes, *[1] * (len(rollouts) - sum(sizes))])]
        first, last = (
            ends[(len(ends) - 1) * rank // self.topology.world_size]
            for rank in (self.topology.rank, self.topology.rank + 1)
        )
        here = rollouts[first:last]

        def score(name: str) -> list[RewardResult]:
            found = [RewardResult(math.nan)] * len(here)
            places = [place for place, rollout in enumerate(here) if name in self._weights(rollout)]
            results = self._reward_functions[name].score([shown(here[place]) for place in places])
            for place, result in zip(places, results, strict=True):
                found[place] = result
            return found

        by_rank = results_or_first_error(
            gather(self.topology, capture(lambda: {name: score(name) for name in late}))
        )
        for name in late:
            early[name] = [result for found in by_rank for result in found[name]]
        return {name: early[name] for name in self.functions}

    def _weights(self, rollout: Rollout) -> Mapping[str, float]:
        """Return the weight of each reward that counts for a completion."""
        return self.of_source.get(rollout.prompt_record.source, self.weights)

    @cached_property
    def _reward_functions(self) -> dict[str, RewardFunction]:
        stops = self.on_error == "stop"
        return {
            name: RewardFunction(function, self.pool, timeout_s=self.timeout_s, stops_at_error=stops)
            for name, function in self.functions.items()
        }

    def _penalty(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Return the penalty of each rollout for its length and for a missing end, float32 [B].

        Source of the length penalty: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
        """
        settings = self.settings
        is_cut = [float(rollout.is_truncated) for rollout in rollouts]
        penalty = settings.missing_end_penalty * torch.tensor(is_cut)
        if settings.overlong_buffer_tokens:
            lengths = torch.tensor([rollout.num_policy_tokens for rollout in rollouts])
            beyond = lengths - (settings.sampling["max_tokens"] - settings.overlong_buffer_tokens)
            penalty += settings.overlong_penalty * (beyond / settings.overlong_buffer_tokens).clamp(0.0, 1.0)
        return penalty


def _without_turn_rewards(rollout: Rollout) -> Rollout:
    return replace(rollout, turn_rewards=()) if rollout.turn_rewards else rollout
