"""Questions put to the engine, and their answers as groups of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vectorlm.data.questions import Question
from vectorlm.ranks.topology import Topology
from vectorlm.rollout.conversation import Ask, Conversation, MakeEnvironment
from vectorlm.rollout.rollout import Rollout
from vectorlm.types import Completion, Engine


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Samples groups of rollouts; its calls are collective, and the rollouts the same on all ranks."""

    engine: Engine
    group_size: int
    """Completions of each question."""
    sampling_params: Mapping[str, Any]
    """As the engine takes them, without `n` and `seed`."""
    seed: int
    """With the place of a question among all of the run, this decides what is sampled."""
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

    def begin(self, questions: Sequence[Question], first_position: int) -> Conversation:
        """Return a group of rollouts for each question, of which nothing has been sampled.

        Args:
            questions: What to ask.
            first_position: The place of the first of them among all that the run asks; the others follow it.
        """
        return Conversation(
            questions,
            range(first_position, first_position + len(questions)),
            group_size=self.group_size,
            sampling_params=self._params,
            seed=self.seed,
            max_model_len=self.max_model_len,
            encode=self.encode,
            make_environment=self.make_environment,
            max_turns=self.max_turns,
            topology=self.topology,
        )

    def collect(self, questions: Sequence[Question], first_position: int) -> list[list[Rollout]]:
        """Return a group of rollouts for each question, sampled with the engine's weights; arguments as for `begin`."""
        conversation = self.begin(questions, first_position)
        while (ask := conversation.ask()) is not None:
            conversation.hear(self.engine.sample(*ask))
        return conversation.groups

    def greedy(self, questions: Sequence[Question]) -> list[Rollout]:
        """Return the likeliest completion of each question; a single turn."""
        return self.heard_greedy(questions, self.engine.sample(*self.ask_greedy(questions)))

    def ask_greedy(self, questions: Sequence[Question]) -> Ask:
        """Return what `greedy` samples."""
        params = {**self._params, "n": 1, "temperature": 0.0}
        return [question.prompt for question in questions], [params] * len(questions)

    @staticmethod
    def heard_greedy(questions: Sequence[Question], answers: Sequence[Sequence[Completion]]) -> list[Rollout]:
        """Make rollouts of the answers to `ask_greedy`."""
        return [
            Rollout.begun(question, completions[0])
            for question, completions in zip(questions, answers, strict=True)
        ]

    @property
    def _params(self) -> dict[str, Any]:
        # The sampled tokens' own log-probabilities cost next to nothing.
        return {"logprobs": 0, **self.sampling_params}
