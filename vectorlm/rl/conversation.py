"""Groups of rollouts while they are being sampled, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from vectorlm.errors import RolloutError
from vectorlm.plugin import TookTooLong, time_limit
from vectorlm.ranks.engine_ranks import gather
from vectorlm.ranks.topology import Topology
from vectorlm.rl.rollout import Rollout
from vectorlm.rl.settings import CollectSettings
from vectorlm.types import Completion, PromptRecord, SamplingRequest


class Environment(Protocol):
    """What one rollout talks to: a tool, a game, a user. Each rollout has an object of its own, on one of the ranks."""

    def respond(self, text: str) -> str | None:
        """Return what the policy reads next, or None to end the rollout.

        Args:
            text: What the policy wrote in this turn.
        """
        ...


MakeEnvironment = Callable[..., Environment]
"""``make(**columns)`` for each rollout, with the columns of its prompt."""


@dataclass(frozen=True, kw_only=True)
class GroupSampler:
    """Knows how the groups of a run are sampled; whoever drives a conversation has the engine."""

    settings: CollectSettings
    seed: int
    """With the position of a prompt and the turn, this decides what is sampled, whatever is sampled beside it."""
    max_model_len: int
    """Longest prompt and completion together, in tokens."""
    encode: Callable[[str], list[int]]
    """Turns an environment's reply into tokens, without special ones."""
    make_environment: MakeEnvironment | None = None
    """None for single turns."""
    topology: Topology = field(default_factory=Topology)
    """This rank; each environment lives on one of the ranks."""

    def begin(self, prompt_records: Sequence[PromptRecord], first_position: int) -> Conversation:
        """Start a group for each prompt; the prompts have consecutive positions among all prompts of the run."""
        return Conversation(self, prompt_records, first_position)

    def greedy_request(self, prompt_records: Sequence[PromptRecord]) -> SamplingRequest:
        """Ask for the likeliest completion of each prompt."""
        params = {**self.sampling_params, "n": 1, "temperature": 0.0}
        return [record.prompt for record in prompt_records], [params] * len(prompt_records)

    @property
    def sampling_params(self) -> dict[str, Any]:
        """The sampling parameters of every rollout; `n` and `seed` are added for each."""
        # The sampled tokens' own log-probabilities cost next to nothing.
        return {"logprobs": 0, **self.settings.sampling}

    def draw_seed(self, *place: int) -> int:
        """Draw the seed of a request: the engine's own random state would not survive a restart."""
        return int(np.random.default_rng((self.seed, *place)).integers(0, 2**62))


class Conversation:
    """Says what is sampled next, and makes rollouts of the answers.

    >>> while (request := conversation.next_request()) is not None:  # doctest: +SKIP
    ...     conversation.receive(engine.sample(*request))
    """

    def __init__(
        self, sampler: GroupSampler, prompt_records: Sequence[PromptRecord], first_position: int
    ) -> None:
        """See `GroupSampler.begin`."""
        self._sampler = sampler
        self._prompt_records = list(prompt_records)
        self._first_position = first_position
        self._group_size = sampler.settings.group_size
        self._rollouts: list[Rollout] = []
        self._environments: dict[int, Environment] = {}
        self._turn = 0
        self._replies: dict[int, tuple[str, tuple[int, ...]]] = {}

    @property
    def groups(self) -> list[list[Rollout]]:
        """The rollouts of each prompt, complete once `next_request` returns None."""
        size = self._group_size
        return [self._rollouts[start : start + size] for start in range(0, len(self._rollouts), size)]

    def next_request(self) -> SamplingRequest | None:
        """Return what the next turn samples; None once every rollout has ended."""
        shared = self._sampler.sampling_params
        draw_seed = self._sampler.draw_seed
        if self._turn == 0:
            seeds = [draw_seed(self._first_position + index) for index in range(len(self._prompt_records))]
            params = [{**shared, "n": self._group_size, "seed": seed} for seed in seeds]
            return [record.prompt for record in self._prompt_records], params
        if not self._replies:
            return None
        prompts, params = [], []
        for index, (_, ids) in self._replies.items():
            rollout = self._rollouts[index]
            row, column = divmod(index, self._group_size)
            prompts.append([*rollout.prompt_token_ids, *rollout.token_ids, *ids])
            seed = draw_seed(self._first_position + row, self._turn, column)
            params.append({**shared, "n": 1, "seed": seed})
        return prompts, params

    def receive(self, answers: Sequence[Sequence[Completion]]) -> None:
        """Take the completions of `next_request`, and let the environments respond; called on all ranks.

        Raises:
            RolloutError: An environment failed.
        """
        if self._turn == 0:
            self._rollouts = [
                Rollout.begun(prompt_record, completion)
                for prompt_record, completions in zip(self._prompt_records, answers, strict=True)
                for completion in completions
            ]
            written = dict(enumerate(rollout.text for rollout in self._rollouts))
        else:
            written = {}
            for (index, (reply, ids)), (completion,) in zip(self._replies.items(), answers, strict=True):
                self._rollouts[index] = self._rollouts[index].continued(ids, reply, completion)
                written[index] = completion.text
        self._turn += 1
        self._replies = {}
        if self._sampler.make_environment is None or self._turn >= self._sampler.settings.max_turns:
            return
        # A truncated turn has not finished what it began to write.
        complete = {index: text for index, text in written.items() if not self._rollouts[index].is_truncated}
        for index, text in self._respond(complete, self._sampler.make_environment).items():
            ids = tuple(self._sampler.encode(text)) if text is not None else ()
            rollout = self._rollouts[index]
            length = len(rollout.prompt_token_ids) + len(rollout.token_ids) + len(ids)
            if text is not None and length < self._sampler.max_model_len:
                self._replies[index] = (text, ids)

    def _respond(self, written: Mapping[int, str], make: MakeEnvironment) -> dict[int, str | None]:
        """Let each rank's environments respond, so that a tool is used once, and give all replies to all ranks."""
        topology = self._sampler.topology
        limit_s = self._sampler.settings.environment_timeout_s
        mine: dict[int, str | None] = {}
        problem = None
        for index, text in written.items():
            if index % topology.world_size != topology.rank:
                continue
            prompt_record = self._rollouts[index].prompt_record
            try:
                with time_limit(limit_s):
                    if index not in self._environments:
                        self._environments[index] = make(**prompt_record.columns)
                    mine[index] = self._environments[index].respond(text)
            except (Exception, SystemExit, TookTooLong) as error:
                what = f"{type(error).__name__}: {error}"
                if isinstance(error, TookTooLong):
                    what = f"no answer within {limit_s:g} s"
                problem = (
                    f"the environment failed: {what} "
                    f"(prompt {str(prompt_record.prompt)[:80]!r}, after {text[:80]!r})"
                )
                break
        found = gather(topology, (mine, problem))
        problems = [problem for _, problem in found if problem is not None]
        if problems:
            raise RolloutError(
                f"{problems[0]}. Catch the error in respond(), and return a text or None instead."
            )
        replies = {index: reply for of_rank, _ in found for index, reply in of_rank.items()}
        return {index: replies[index] for index in written}
