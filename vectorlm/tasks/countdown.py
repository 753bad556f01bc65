"""The Countdown reward: does a completion reach the target with the given numbers?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vectorlm.tasks.arithmetic import evaluate

WRONG_REWARD = 0.1
"""The reward of an answer in the right format with wrong numbers or a wrong value."""

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def countdown_reward(completion: str, *, numbers: Sequence[int], target: int, **_columns: object) -> float:
    """Score one completion of a Countdown problem.

    1.0 when the last ``<answer>…</answer>`` is an expression over ``+ - * /`` and parentheses that uses each
    of `numbers` exactly once, whatever their order, and equals `target`; `WRONG_REWARD` for any other answer;
    0.0 without an answer. Other columns are ignored, so that a whole row can be passed.

    *Source*: the rule of the TinyZero reproduction (Pan et al. 2025), with exact fractions and no ``eval``.
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
