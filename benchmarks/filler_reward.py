"""A reward of async.py, in a file that configs can name."""

from __future__ import annotations


def kept(completion: str, filler: str) -> float:
    """Reward the filler that the question asks for: without it, lengths would drift while answers get better."""
    return float(completion.endswith(f"</answer>{filler}"))
