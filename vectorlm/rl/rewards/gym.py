"""The reward of reasoning-gym's tasks, from the scorer of the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from vectorlm.rl.rewards.code import OverLimit, limited


def reasoning_gym(completion: str, item: Mapping[str, Any]) -> float:
    """Score the answer with the scorer of its task, from 0 to 1; some tasks reward partly correct answers.

    The answer is the text in the last ``<answer>`` tags, or else the whole text. The reward is 0 if the scorer cannot
    read the answer, or not within 3 s of CPU time.
    *Source*: the package reasoning-gym.

    Args:
        completion: The text of the model.
        item: The row of the task: ``question``, ``answer`` and ``metadata``.
    """
    try:
        return float(limited("reasoning_gym", f"{__name__}:scored", completion, item))
    except OverLimit:
        return 0.0


def scored(completion: str, item: Mapping[str, Any]) -> float:
    """Return the score of an answer from the task's scorer.

    Raises:
        Exception: The scorer cannot read the correct answer either.
    """
    from reasoning_gym.utils import extract_answer

    score, answer = _scorer(item["metadata"]["source_dataset"]), extract_answer(completion)
    try:
        return score(completion.strip() if answer is None else answer, item)
    except BaseException:  # Some scorers evaluate the answer, which may be exit().
        score(item["answer"], item)
        return 0.0


@cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(task)
