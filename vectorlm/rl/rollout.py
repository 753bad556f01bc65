"""Rollouts: a prompt with what the policy and its environment wrote after it, and the rollouts of one prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import torch

from vectorlm.algorithms.groups import is_constant
from vectorlm.types import Completion, PromptRecord


@dataclass(frozen=True)
class Rollout:
    """One completion of one prompt; with an environment, all its turns in a row."""

    prompt_record: PromptRecord
    """The prompt, with the columns that rewards read."""
    prompt_token_ids: tuple[int, ...]
    """The prompt as the engine saw it."""
    token_ids: tuple[int, ...]
    """All tokens after the prompt."""
    policy_mask: tuple[bool, ...]
    """Which of `token_ids` the policy chose; the environment wrote the others."""
    sampler_logprobs: tuple[float, ...]
    """The engine's log-probability of each of `token_ids`; 0 for tokens of the environment."""
    versions: tuple[int, ...]
    """The weight version that sampled each of `token_ids`; -1 for tokens of the environment."""
    text: str
    """`token_ids` as text."""
    finish_reason: str | None
    """How the last turn ended: ``stop``, ``length``, also where there was no room for another turn, or ``abort``."""
    num_turns: int = 1
    """Number of turns of the policy."""
    turn_ends: tuple[int, ...] = ()
    """Where each turn ends in `token_ids`; those of an environment's turns."""
    turn_rewards: tuple[float, ...] = ()
    """What the environment gave for each turn, 0 for nothing; missing ones at the end are 0."""
    branches: tuple[Rollout, ...] = ()
    """Further rows, where an agent has rewritten or forked what it asked; each token is trained on in one of them."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The whole chat of a rollout with an environment; None where the prompt is none."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """The environment's metrics, the last of each name."""
    turn_texts: Sequence[str] = ()
    """What the policy wrote in each turn; empty if `text` is all of it."""
    policy_contents: Sequence[tuple[int, str]] = ()
    """The index in `messages` of every message of the policy, and its content without the environment's words."""
    is_replayed: bool = False
    """Whether it comes from a file; its `versions` count the steps of the run that wrote the file."""

    @property
    def rows(self) -> tuple[Rollout, ...]:
        """The rollout's own row, and its branches."""
        return (self, *self.branches)

    @property
    def is_truncated(self) -> bool:
        """Whether the last turn reached its token limit, or there was no room for another one."""
        return self.finish_reason == "length"

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy chose, in all rows."""
        return sum(sum(row.policy_mask) for row in self.rows)

    @property
    def sampled_versions(self) -> list[int]:
        """The weight version of each token that the policy chose, in all rows."""
        return [
            version
            for row in self.rows
            for version, is_chosen in zip(row.versions, row.policy_mask, strict=True)
            if is_chosen and version >= 0
        ]

    @property
    def policy_text(self) -> str:
        """What the policy wrote, every turn on a new line."""
        return "\n".join(self.turn_texts) or self.text

    @property
    def policy_token_ids(self) -> tuple[int, ...]:
        """The tokens that the policy chose."""
        return tuple(compress(self.token_ids, self.policy_mask))

    @property
    def turn_places(self) -> list[tuple[int, int]]:
        """From where to where in `token_ids` the policy wrote in each turn, as far as it is trained on here."""
        found, before = [], 0
        for end in self.turn_ends or (len(self.token_ids),):
            if True in self.policy_mask[before:end]:
                found.append((self.policy_mask.index(True, before), end))
            before = end
        return found

    @classmethod
    def begun(cls, prompt_record: PromptRecord, completion: Completion) -> Rollout:
        """Return the rollout after the first turn."""
        return cls(
            prompt_record,
            completion.prompt_token_ids,
            completion.token_ids,
            (True,) * len(completion.token_ids),
            completion.sampler_logprobs or (0.0,) * len(completion.token_ids),
            completion.versions,
            completion.text,
            completion.finish_reason,
            turn_ends=(len(completion.token_ids),),
            turn_texts=(completion.text,),
        )

    def rewarded(self, reward: float | None) -> Rollout:
        """Return the rollout with a reward more for its last turn."""
        if not reward:
            return self
        *before, last = [*self.turn_rewards, *[0.0] * (self.num_turns - len(self.turn_rewards))]
        return replace(self, turn_rewards=(*before, last + reward))

    def continued(self, reply_ids: tuple[int, ...], reply: str, completion: Completion) -> Rollout:
        """Return the rollout after the environment's reply and another turn."""
        turn, gap = len(completion.token_ids), len(reply_ids)
        return Rollout(
            self.prompt_record,
            self.prompt_token_ids,
            self.token_ids + reply_ids + completion.token_ids,
            self.policy_mask + (False,) * gap + (True,) * turn,
            self.sampler_logprobs + (0.0,) * gap + (completion.sampler_logprobs or (0.0,) * turn),
            self.versions + (-1,) * gap + completion.versions,
            self.text + reply + completion.text,
            completion.finish_reason,
            self.num_turns + 1,
            (*self.turn_ends, len(self.token_ids) + gap + turn),
            self.turn_rewards,
            measured=self.measured,
            turn_texts=(*self.turn_texts, completion.text),
        )


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """The rollouts of one prompt with their rewards; G rollouts."""

    rollouts: Sequence[Rollout]
    rewards: torch.Tensor
    """float32 [G], length penalties included; NaN where a rollout could not be scored."""
    rewards_by_name: Mapping[str, torch.Tensor]
    """float32 [G] of each reward alone."""
    greedy_reward: torch.Tensor | None = None
    """float32 [], the reward of a greedy completion, for algorithms that need one."""
    errors: tuple[str, ...] = ()
    """Calls of reward functions that raised or ran out of time."""
    is_dropped: bool = False
    """Whether dynamic sampling dropped the group, which is then only counted."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each reward in the sum."""
    logged: Sequence[Mapping[str, Any]] = ()
    """What the environment measured of each rollout, and reward functions logged of it."""

    @property
    def source(self) -> str:
        """Which of several sources the prompt comes from."""
        return self.rollouts[0].prompt_record.source

    @property
    def is_constant(self) -> bool:
        """Whether all rewards are equal, and those of each turn, so that the group teaches nothing."""
        if any(map(any, by_turn := {rollout.turn_rewards for rollout in self.rollouts})) and len(by_turn) > 1:
            return False
        return self.has_equal_sums

    @property
    def has_equal_sums(self) -> bool:
        """Whether all rewards are equal, so that the group teaches nothing to an algorithm that reads no turns."""
        return bool(is_constant(self.rewards[None], ~self.rewards[None].isnan()))


def logged_means(logged: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of the numbers under each name, over the completions that have one."""
    numbers: dict[str, list[float]] = {}
    for each in logged:
        for name, value in each.items():
            if isinstance(value, bool | float):
                numbers.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(numbers.items())}


def kept_groups(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return the groups that dynamic sampling has not dropped."""
    return [group for group in groups if not group.is_dropped]
