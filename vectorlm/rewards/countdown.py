"""The Countdown reward: does a completion reach the target with the given numbers?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vectorlm.rewards.arithmetic import evaluate

WRONG_REWARD = 0.1
"""What an answer in the right format is worth when its numbers or its value are wrong."""

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def countdown_reward(completion: str, *, numbers: Sequence[int], target: int, **_columns: object) -> float:
    """Score one completion of a Countdown question.

    1.0 when the last ``<answer>…</answer>`` is an expression over ``+ - * /`` and parentheses that uses each
    of `numbers` exactly once, whatever their order, and equals `target`; `WRONG_REWARD` for any other answer;
    0.0 without an answer.

    *Source*: the rule of the TinyZero reproduction (Pan et al. 2025), with exact fractions and no ``eval``.

    Args:
        completion: The sampled text, without the prompt.
        numbers: The numbers of the question.
        target: The value to reach.
        **_columns: The question's other columns; ignored, so that a whole row can be passed.
    """
    answers = _ANSWER.findall(completion)
    if not answers:
        return 0.0
    try:
        evaluation = evaluate(answers[-1])
    except ValueError:
        return WRONG_REWARD
    is_right = sorted(evaluation.numbers) == sorted(numbers) and evaluation.value == target
    return 1.0 if is_right else WRONG_REWARD
