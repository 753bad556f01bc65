"""The gold rule of learned_reward.py, in a file that configs can name: how near an answer comes to its target."""

from __future__ import annotations

from vectorlm.rewards.countdown import evaluate

HALF = 5
"""The distance from the target at which an answer is worth half."""


def near(completion: str, *, target: int, **_columns: object) -> float:
    """Score the value of an answer by its distance from the target, from 0 to 1, whatever its numbers; 0 for others."""
    _, opened, rest = completion.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    if not (opened and closed):
        return 0.0
    try:
        value, _ = evaluate(answer)
    except ValueError:
        return 0.0
    return float(HALF / (HALF + abs(value - target)))
