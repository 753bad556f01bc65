"""Groups of rollouts while they are being sampled, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist

from vectorlm.data.questions import Question
from vectorlm.errors import RolloutError
from vectorlm.ranks.topology import Topology
from vectorlm.rollout.rollout import Rollout
from vectorlm.types import Completion


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

Ask = tuple[list[Any], list[dict[str, Any]]]
"""Prompts, and the sampling parameters of each."""


class Conversation:
    """Says what is to be sampled next, and makes rollouts of the answers; whoever drives it has the engine.

    >>> while (ask := conversation.ask()) is not None:  # doctest: +SKIP
    ...     conversation.hear(engine.sample(*ask))
    """

    def __init__(
        self,
        questions: Sequence[Question],
        positions: Sequence[int],
        *,
        group_size: int,
        sampling_params: Mapping[str, Any],
        seed: int,
        max_model_len: int,
        encode: Callable[[str], list[int]],
        make_environment: MakeEnvironment | None,
        max_turns: int,
        topology: Topology,
    ) -> None:
        """Begin.

        Args:
            questions: One for each group.
            positions: The place of each question among all that the run asks: with `seed` and the turn it decides what
                is sampled, whatever else is sampled beside it.
            group_size: Completions of each question.
            sampling_params: As the engine takes them, without `n` and `seed`.
            seed: The run's.
            max_model_len: Longest prompt and completion together, in tokens.
            encode: Turns an environment's reply into tokens, without special ones.
            make_environment: None for single turns.
            max_turns: Turns of the policy after which a rollout ends.
            topology: This rank's place: environments are shared out over the ranks.
        """
        self._questions, self._positions = list(questions), list(positions)
        self._group_size, self._params, self._seed = group_size, sampling_params, seed
        self._max_model_len, self._encode = max_model_len, encode
        self._make_environment, self._max_turns, self._topology = make_environment, max_turns, topology
        self._rollouts: list[Rollout] = []
        self._environments: dict[int, Environment] = {}
        self._turn = 0
        self._replies: dict[int, tuple[str, tuple[int, ...]]] = {}

    @property
    def groups(self) -> list[list[Rollout]]:
        """The rollouts of each question, as far as they have come."""
        size = self._group_size
        return [self._rollouts[start : start + size] for start in range(0, len(self._rollouts), size)]

    def ask(self) -> Ask | None:
        """Return what the next turn samples; None once every rollout has ended."""
        if self._turn == 0:
            params = [
                {**self._params, "n": self._group_size, "seed": self._draw(position)}
                for position in self._positions
            ]
            return [question.prompt for question in self._questions], params
        if not self._replies:
            return None
        prompts, params = [], []
        for index, (_, ids) in self._replies.items():
            rollout = self._rollouts[index]
            row, column = divmod(index, self._group_size)
            prompts.append([*rollout.prompt_token_ids, *rollout.token_ids, *ids])
            seed = self._draw(self._positions[row], self._turn, column)
            params.append({**self._params, "n": 1, "seed": seed})
        return prompts, params

    def hear(self, answers: Sequence[Sequence[Completion]]) -> None:
        """Take the completions of what `ask` returned, and let the environments respond; called on all ranks.

        Raises:
            RolloutError: An environment failed.
        """
        if self._turn == 0:
            self._rollouts = [
                Rollout.begun(question, completion)
                for question, completions in zip(self._questions, answers, strict=True)
                for completion in completions
            ]
            said = dict(enumerate(rollout.text for rollout in self._rollouts))
        else:
            said = {}
            for (index, (reply, ids)), (completion,) in zip(self._replies.items(), answers, strict=True):
                self._rollouts[index] = self._rollouts[index].continued(ids, reply, completion)
                said[index] = completion.text
        self._turn += 1
        self._replies = {}
        if self._make_environment is None or self._turn >= self._max_turns:
            return
        # A turn that was cut off has not finished what it wanted to say.
        heard = {index: text for index, text in said.items() if not self._rollouts[index].is_truncated}
        for index, answer in self._respond(heard).items():
            ids = tuple(self._encode(answer)) if answer is not None else ()
            if answer is not None and self._has_room(self._rollouts[index], ids):
                self._replies[index] = (answer, ids)

    def _respond(self, said: Mapping[int, str]) -> dict[int, str | None]:
        """Let each rank's environments respond, so that a tool is used once, and give all replies to all ranks."""
        assert self._make_environment is not None
        mine: dict[int, str | None] = {}
        problem = None
        for index, text in said.items():
            if index % self._topology.world_size != self._topology.rank:
                continue
            question = self._rollouts[index].question
            try:
                if index not in self._environments:
                    self._environments[index] = self._make_environment(**question.columns)
                mine[index] = self._environments[index].respond(text)
            except Exception as error:
                problem = (
                    f"the environment failed: {type(error).__name__}: {error} (prompt {str(question.prompt)[:80]!r}, "
                    f"after {text[:80]!r})"
                )
                break
        shares: list[Any] = [(mine, problem)]
        if self._topology.world_size > 1:
            shares = [None] * self._topology.world_size
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
        return length < self._max_model_len

    def _draw(self, *place: int) -> int:
        """Draw a seed: the engine's own random state would not survive a restart."""
        return int(np.random.default_rng((self._seed, *place)).integers(0, 2**62))
