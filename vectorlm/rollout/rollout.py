"""One rollout: a prompt, what the policy said to it, and what was said to the policy in between."""

from __future__ import annotations

from dataclasses import dataclass

from vectorlm.data.questions import Question
from vectorlm.types import Completion


@dataclass(frozen=True)
class Rollout:
    """One completion of one question; with an environment, all its turns in a row."""

    question: Question
    """What was asked."""
    prompt_token_ids: tuple[int, ...]
    """The prompt as the engine saw it."""
    token_ids: tuple[int, ...]
    """Everything behind the prompt."""
    policy_mask: tuple[bool, ...]
    """Which of `token_ids` the policy chose; the others are the environment's."""
    sampler_logprobs: tuple[float, ...]
    """The engine's log-probability of each of `token_ids`; 0 for the environment's."""
    versions: tuple[int, ...]
    """The weight version that sampled each of `token_ids`; -1 for the environment's."""
    text: str
    """Everything behind the prompt, as text."""
    finish_reason: str | None
    """That of the last turn: ``stop``, ``length`` or ``abort``."""
    num_turns: int = 1
    """Turns of the policy."""
    is_replayed: bool = False
    """Whether it comes from a file; `versions` are then those of the run that wrote it."""

    @property
    def is_truncated(self) -> bool:
        """Whether the last turn was cut off at its longest length."""
        return self.finish_reason == "length"

    @property
    def num_policy_tokens(self) -> int:
        """Tokens that the policy chose."""
        return sum(self.policy_mask)

    @classmethod
    def begun(cls, question: Question, completion: Completion) -> Rollout:
        """Make a rollout of the policy's first turn."""
        return cls(
            question,
            completion.prompt_token_ids,
            completion.token_ids,
            (True,) * len(completion.token_ids),
            completion.sampler_logprobs or (0.0,) * len(completion.token_ids),
            completion.versions,
            completion.text,
            completion.finish_reason,
        )

    def continued(self, reply_ids: tuple[int, ...], reply: str, completion: Completion) -> Rollout:
        """Return this rollout with the environment's reply and the policy's next turn behind it."""
        turn, gap = len(completion.token_ids), len(reply_ids)
        return Rollout(
            self.question,
            self.prompt_token_ids,
            self.token_ids + reply_ids + completion.token_ids,
            self.policy_mask + (False,) * gap + (True,) * turn,
            self.sampler_logprobs + (0.0,) * gap + (completion.sampler_logprobs or (0.0,) * turn),
            self.versions + (-1,) * gap + completion.versions,
            self.text + reply + completion.text,
            completion.finish_reason,
            self.num_turns + 1,
        )
