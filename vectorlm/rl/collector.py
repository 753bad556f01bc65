"""The rollouts of a step: sampled, scored, and filtered by dynamic sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import torch

from vectorlm.algorithms.groups import join_equal
from vectorlm.rl.conversation import Conversation, GroupSampler
from vectorlm.rl.prompts import PromptOrder
from vectorlm.rl.rollout import Rollout, RolloutGroup
from vectorlm.train.recorder import Timer
from vectorlm.types import Completion, Engine, Handle, PromptRecord, SamplingRequest

WAIT_S = 0.05
"""Longest wait for the engine before the ranks look at what they have."""


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


@dataclass(eq=False)
class PendingGroups:
    """Groups that are sampled and scored together, from their first request on."""

    prompt_records: Sequence[PromptRecord]
    conversation: Conversation | None = None
    """None for stored groups."""
    stored: Sequence[list[Rollout]] = ()
    handles: dict[str, Handle] = field(default_factory=dict)
    """Requests in flight: the ``groups``, and their ``greedy`` completions."""
    greedy: list[Rollout] = field(default_factory=list)
    scored: list[RolloutGroup] = field(default_factory=list)
    """One for each prompt; empty before."""

    @property
    def is_finished(self) -> bool:
        """Whether no request is in flight."""
        return not self.handles

    @property
    def groups(self) -> Sequence[list[Rollout]]:
        """The rollouts of each prompt, complete once this is finished."""
        return self.stored if self.conversation is None else self.conversation.groups

    @property
    def are_dropped(self) -> list[bool]:
        """Whether dynamic sampling has dropped each group; False while that is not known."""
        return [group.is_dropped for group in self.scored] or [False] * len(self.prompt_records)


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

        Dynamic sampling goes in rounds, each of as many groups as are missing, and what is returned is what the rounds
        bring. But a group is sampled as soon as a later round is certain to need it, while others of the rounds before
        are still in flight.

        Raises:
            RewardError: A reward function failed, and the run is set to stop then.
            RolloutError: An environment failed.
        """
        fresh: list[PendingGroups] = []
        stored: list[PendingGroups] = []
        while True:
            rounds = self._rounds(fresh, stored)
            with timer.span("time/generate_s"):
                self._begin(rounds, fresh, stored)
                self.receive([*fresh, *stored], WAIT_S)
            finished = [each for each in (*fresh, *stored) if each.is_finished and not each.scored]
            if finished:
                with timer.span("time/score_s"):
                    self.score_pending(finished)
            # More may have been begun than the rounds take: which share of a round is stored is rounded.
            num_fresh, num_stored = (sum(counts) for counts in zip(*rounds, strict=True))
            needed = [*fresh[:num_fresh], *stored[:num_stored]]
            if all(each.scored for each in needed) and self._rounds(fresh, stored) == rounds:
                self._put_back(fresh[num_fresh:], self.prompts)
                if self.replay is not None:
                    self._put_back(stored[num_stored:], self.replay)
                groups = [iter([group for each in kind for group in each.scored]) for kind in (fresh, stored)]
                return [
                    group
                    for counts in rounds
                    for kind, count in zip(groups, counts, strict=True)
                    for group in islice(kind, count)
                ]

    def _rounds(
        self, fresh: Sequence[PendingGroups], stored: Sequence[PendingGroups]
    ) -> list[tuple[int, int]]:
        """Return the fresh and the stored groups of each round, as far as it is certain: the others may all be kept."""
        dropped = [[flag for each in kind for flag in each.are_dropped] for kind in (fresh, stored)]
        rounds: list[tuple[int, int]] = []
        num_missing = self.sampler.settings.prompts_per_step
        places = [0, 0]
        limit = self.sampler.settings.max_sampling_rounds if self.drops_constant_groups else 1
        while num_missing and len(rounds) < limit:
            num_stored = 0 if self.replay is None else round(num_missing * self.replayed_share)
            rounds.append((num_missing - num_stored, num_stored))
            num_missing = 0
            for kind, count in enumerate(rounds[-1]):
                num_missing += sum(dropped[kind][places[kind] : places[kind] + count])
                places[kind] += count
        return rounds

    def _begin(
        self,
        rounds: Sequence[tuple[int, int]],
        fresh: list[PendingGroups],
        stored: list[PendingGroups],
    ) -> None:
        """Begin what the rounds need and nobody has begun; without dynamic sampling all of it as one."""
        num_fresh, num_stored = (
            max(sum(counts) - sum(len(each.prompt_records) for each in begun), 0)
            for counts, begun in zip(zip(*rounds, strict=True), (fresh, stored), strict=True)
        )
        position = self.prompts.position
        records = self.prompts.take(num_fresh)
        size = 1 if self.drops_constant_groups else max(num_fresh, 1)
        new = [
            PendingGroups(
                records[start : start + size],
                self.sampler.begin(records[start : start + size], position + start),
            )
            for start in range(0, num_fresh, size)
        ]
        old = [] if self.replay is None else self.replay.take(num_stored)
        kept = [PendingGroups([group[0].prompt_record], stored=[group]) for group in old]
        fresh += new
        stored += kept
        self.submit([*new, *kept])

    @staticmethod
    def _put_back(pending: Sequence[PendingGroups], order: PromptOrder[Any]) -> None:
        """Leave what no round needed after all to the next step."""
        order.position -= len(pending)
        for each in pending:
            for handle in each.handles.values():
                handle.cancel()

    def submit(self, pending: Sequence[PendingGroups]) -> None:
        """Ask for what these need first."""
        requests: list[tuple[PendingGroups, str, SamplingRequest]] = []
        for each in pending:
            if each.conversation is not None and (request := each.conversation.next_request()) is not None:
                requests.append((each, "groups", request))
            if self.needs_greedy:
                requests.append((each, "greedy", self.sampler.greedy_request(each.prompt_records)))
        self._send(requests)

    def receive(self, pending: Sequence[PendingGroups], timeout_s: float) -> None:
        """Take what the engine has finished, and ask for the next turns; wait `timeout_s` at most for something."""
        finished = {id(handle): handle for handle in self.engine.poll(timeout_s)}
        turns = []
        for each in pending:
            for name, handle in list(each.handles.items()):
                if id(handle) not in finished:
                    continue
                del each.handles[name]
                if name == "greedy":
                    each.greedy = greedy_rollouts(each.prompt_records, handle.result())
                elif each.conversation is not None:
                    each.conversation.receive(handle.result())
                    if (request := each.conversation.next_request()) is not None:
                        turns.append((each, name, request))
        self._send(turns)

    def _send(self, requests: Sequence[tuple[PendingGroups, str, SamplingRequest]]) -> None:
        if requests:
            handles = self.engine.submit_many([request for *_, request in requests])
            for (each, name, _), handle in zip(requests, handles, strict=True):
                each.handles[name] = handle

    def score_pending(self, pending: Sequence[PendingGroups]) -> None:
        """Score what has finished, together: a reward function may want to see many."""
        groups = [group for each in pending for group in each.groups]
        scored = iter(self.score(groups, [rollout for each in pending for rollout in each.greedy]))
        for each in pending:
            each.scored = [next(scored) for _ in each.prompt_records]

    def score(
        self, groups: Sequence[Sequence[Rollout]], greedy: Sequence[Rollout] = ()
    ) -> list[RolloutGroup]:
        """Score groups, and the greedy completion of each where the algorithm needs one."""
        scored = self.scorer.score(groups, greedy)
        settings = self.sampler.settings
        has_penalty = settings.overlong_buffer_tokens > 0 or settings.missing_end_penalty > 0
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
            scored = [replace(each, is_dropped=each.is_constant) for each in scored]
        return scored

    def _penalty(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Return what each rollout loses for its length, and for not having ended, float32 [G].

        Source of the first: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
        """
        settings = self.sampler.settings
        found = settings.missing_end_penalty * torch.tensor([float(each.is_truncated) for each in rollouts])
        if settings.overlong_buffer_tokens:
            lengths = torch.tensor([each.num_policy_tokens for each in rollouts])
            beyond = lengths - (settings.sampling["max_tokens"] - settings.overlong_buffer_tokens)
            found += settings.overlong_penalty * (beyond / settings.overlong_buffer_tokens).clamp(0.0, 1.0)
        return found


def greedy_rollouts(
    prompt_records: Sequence[PromptRecord], answers: Sequence[Sequence[Completion]]
) -> list[Rollout]:
    """Make rollouts of the answers to `GroupSampler.greedy_request`."""
    return [Rollout.begun(record, answer) for record, (answer,) in zip(prompt_records, answers, strict=True)]
