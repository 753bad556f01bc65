"""Questions put to the engine, and their answers as groups of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist

from vectorlm.data.questions import Question
from vectorlm.errors import RolloutError
from vectorlm.ranks.topology import Topology
from vectorlm.rollout.rollout import Rollout
from vectorlm.types import Engine


class Environment(Protocol):
    """What one rollout talks to: a tool, a game, a user. One object per rollout, which lives on one of the ranks."""

    def respond(self, text: str) -> str | None:
        """Return what the policy reads next, or None to end the rollout.

        Args:
            text: What the policy just said, in this turn.
        """
        ...


MakeEnvironment = Callable[..., Environment]
"""``make(**columns)`` for each rollout, with the columns of its question."""


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Samples groups of rollouts; its calls are collective, and the rollouts the same on all ranks."""

    engine: Engine
    group_size: int
    """Completions of each question."""
    sampling_params: Mapping[str, Any]
    """As the engine takes them, without `n` and `seed`."""
    seed: int
    """With the step and the place in the batch, this decides what is sampled."""
    max_model_len: int
    """Longest prompt and completion together, in tokens."""
    encode: Callable[[str], list[int]]
    """Turns an environment's reply into tokens, without special ones."""
    make_environment: MakeEnvironment | None = None
    """None for single turns."""
    max_turns: int = 1
    """Turns of the policy after which a rollout ends."""
    topology: Topology = field(default_factory=Topology)
    """This rank's place: environments are shared out over the ranks."""

    def collect(self, questions: Sequence[Question], step: int, round_index: int = 0) -> list[list[Rollout]]:
        """Return a group of rollouts for each question, sampled with the engine's weights.

        Args:
            questions: What to ask.
            step: The training step; with `round_index` it makes the random numbers of this call its own.
            round_index: Counts the calls of a step.
        """
        seeds = self._seeds(len(questions), step, round_index)
        params = [{**self._params, "n": self.group_size, "seed": seed} for seed in seeds]
        answers = self.engine.sample([question.prompt for question in questions], params)
        groups = [
            [Rollout.begun(question, completion) for completion in completions]
            for question, completions in zip(questions, answers, strict=True)
        ]
        return groups if self.make_environment is None else self._converse(groups, step, round_index)

    def greedy(self, questions: Sequence[Question]) -> list[Rollout]:
        """Return the likeliest completion of each question; a single turn."""
        params = {**self._params, "n": 1, "temperature": 0.0}
        answers = self.engine.sample([question.prompt for question in questions], params)
        return [
            Rollout.begun(question, completions[0])
            for question, completions in zip(questions, answers, strict=True)
        ]

    @property
    def _params(self) -> dict[str, Any]:
        # The sampled tokens' own log-probabilities cost next to nothing.
        return {"logprobs": 0, **self.sampling_params}

    def _seeds(self, count: int, *place: int) -> list[int]:
        """Draw a seed for each prompt: the engine's own random state would not survive a restart."""
        drawn = np.random.default_rng((self.seed, *place)).integers(0, 2**62, count)
        return [int(seed) for seed in drawn]

    def _converse(self, groups: list[list[Rollout]], step: int, round_index: int) -> list[list[Rollout]]:
        """Let every rollout and its environment talk in turns until all have ended."""
        assert self.make_environment is not None
        rollouts = [rollout for group in groups for rollout in group]
        environments: dict[int, Environment] = {}
        said = [rollout.text for rollout in rollouts]
        active = list(range(len(rollouts)))
        for turn in range(1, self.max_turns):
            replies: dict[int, tuple[str, tuple[int, ...]]] = {}
            # A turn that was cut off has not finished what it wanted to say.
            asked = {index: said[index] for index in active if not rollouts[index].is_truncated}
            for index, reply in self._replies(environments, rollouts, asked).items():
                ids = tuple(self.encode(reply)) if reply is not None else ()
                if reply is not None and self._has_room(rollouts[index], ids):
                    replies[index] = (reply, ids)
            if not replies:
                break
            active = sorted(replies)
            seeds = self._seeds(len(active), step, round_index, turn)
            prompts = [
                [*rollouts[index].prompt_token_ids, *rollouts[index].token_ids, *replies[index][1]]
                for index in active
            ]
            params = [{**self._params, "n": 1, "seed": seed} for seed in seeds]
            answers = self.engine.sample(prompts, params)
            for index, (completion,) in zip(active, answers, strict=True):
                reply, ids = replies[index]
                rollouts[index] = rollouts[index].continued(ids, reply, completion)
                said[index] = completion.text
        size = self.group_size
        return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]

    def _replies(
        self, environments: dict[int, Environment], rollouts: Sequence[Rollout], said: Mapping[int, str]
    ) -> dict[int, str | None]:
        """Let each rank's environments respond, so that a tool is used once, and give all replies to all ranks."""
        assert self.make_environment is not None
        mine: dict[int, str | None] = {}
        problem = None
        for index, text in said.items():
            if index % self.topology.world_size != self.topology.rank:
                continue
            question = rollouts[index].question
            try:
                if index not in environments:
                    environments[index] = self.make_environment(**question.columns)
                mine[index] = environments[index].respond(text)
            except Exception as error:
                problem = (
                    f"the environment failed: {type(error).__name__}: {error} (prompt {str(question.prompt)[:80]!r}, "
                    f"after {text[:80]!r})"
                )
                break
        shares: list[Any] = [(mine, problem)]
        if self.topology.world_size > 1:
            shares = [None] * self.topology.world_size
            dist.all_gather_object(shares, (mine, problem))
        problems = [problem for _, problem in shares if problem is not None]
        if problems:
            raise RolloutError(
                f"{problems[0]}. Catch in it what may go wrong, and answer with a text or None."
            )
        found = {index: reply for replies, _ in shares for index, reply in replies.items()}
        return {index: found[index] for index in said}

    def _has_room(self, rollout: Rollout, reply_ids: tuple[int, ...]) -> bool:
        length = len(rollout.prompt_token_ids) + len(rollout.token_ids) + len(reply_ids)
        return length < self.max_model_len
