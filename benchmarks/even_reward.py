"""The reward of rl_step.py, in a file that configs can name."""

from __future__ import annotations


def even(text: str, **columns: object) -> float:
    """Reward the share of even tokens, so that the completions of a group differ."""
    tokens = text.split()
    return sum(int(token) % 2 == 0 for token in tokens if token.isdigit()) / max(len(tokens), 1)
