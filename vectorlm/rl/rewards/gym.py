"""The reward of reasoning-gym's tasks: each task's own scorer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from vectorlm.rl.rewards.code import OverLimit, limited


def reasoning_gym(completion: str, item: Mapping[str, Any]) -> float:
    """Score the answer by the task that made the item, from 0 to 1; partly right answers count in some tasks.

    The answer is what the last ``<answer>`` tags hold; without such tags it is the whole text. An answer that the
    scorer cannot read, or not within 3 s of processor time, is worth 0.
    *Source*: the package reasoning-gym.

    Args:
        completion: The text of the model.
        item: What the task made: ``question``, ``answer`` and ``metadata``.
    """
    try:
        return float(limited("reasoning_gym", f"{__name__}:scored", completion, item))
    except OverLimit:
        return 0.0


def scored(completion: str, item: Mapping[str, Any]) -> float:
    """Return what the task's scorer gives the answer.

    Raises:
        Exception: The scorer cannot read the right answer either.
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
