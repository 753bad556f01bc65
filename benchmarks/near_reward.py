"""The gold rule of learned_reward.py, in a file that configs can name: how near the answer's value is to 30."""

from __future__ import annotations

from vectorlm.rl.rewards.countdown import evaluate

BEST, HALF = 30, 5
"""The value with a reward of 1, and the distance from it at which the reward is 0.5."""


def near(completion: str, **_columns: object) -> float:
    """Return a reward from 0 to 1 by the distance of the answer's value from `BEST`; 0 without a valid answer."""
    _, opened, rest = completion.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    if not (opened and closed):
        return 0.0
    try:
        value, _ = evaluate(answer)
    except ValueError:
        return 0.0
    return float(HALF / (HALF + abs(value - BEST)))
