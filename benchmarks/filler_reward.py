"""A reward function of async.py, in a file that configs can name."""

from __future__ import annotations


def kept(completion: str, filler: str) -> float:
    """Return 1 for the filler that the question asks for, else 0; without this reward, lengths drift in training."""
    return float(completion.endswith(f"</answer>{filler}"))
