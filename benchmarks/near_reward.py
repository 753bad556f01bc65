"""The gold rule of learned_reward.py, in a file that configs can name: how near an answer comes to 30."""

from __future__ import annotations

from vectorlm.rl.rewards.countdown import evaluate

BEST, HALF = 30, 5
"""The value that is worth 1, and the distance from it at which an answer is worth half."""


def near(completion: str, **_columns: object) -> float:
    """Score the value of an answer by its distance from `BEST`, from 0 to 1; 0 for what is no answer."""
    _, opened, rest = completion.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    if not (opened and closed):
        return 0.0
    try:
        value, _ = evaluate(answer)
    except ValueError:
        return 0.0
    return float(HALF / (HALF + abs(value - BEST)))
