"""The reward of reasoning-gym's tasks: each task's own scorer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


def reasoning_gym(completion: str, item: Mapping[str, Any]) -> float:
    """Score the answer by the task that made the item, from 0 to 1; partly right answers count in some tasks.

    The answer is what the last ``<answer>`` tags hold; without such tags it is the whole text.
    *Source*: the package reasoning-gym.

    Args:
        completion: The text of the model.
        item: What the task made: ``question``, ``answer`` and ``metadata``.
    """
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(completion)
    return float(
        _scorer(item["metadata"]["source_dataset"])(completion.strip() if answer is None else answer, item)
    )


@cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(task)
