"""Rewards for mathematics: equal to the right answer as a formula, or as the text in a box."""

from __future__ import annotations

import logging
import re

# Each call would say that its own time limits are off: a reward's worker has one.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math(completion: str, answer: str | float) -> float | None:
    r"""Return 1.0 if the completion's final formula equals the answer, else 0.0; None if the answer is no formula.

    The formula is taken from ``\boxed{}``, from ``$...$``, or is the last number or expression of the text.
    *Source*: the package math-verify.

    Args:
        completion: The text of the model.
        answer: A number, an expression or LaTeX, with or without ``$``.
    """
    from math_verify import parse, verify

    # An expression such as x+1 is found between dollars alone.
    gold = parse(f"${answer}$".replace("$$", "$"), parsing_timeout=None)
    if not gold:
        return None
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))


def boxed(completion: str, answer: str | float) -> float:
    r"""Return 1.0 if the completion's last ``\boxed{}`` holds the answer, white space aside, else 0.0."""
    start = completion.rfind(r"\boxed{")
    if start < 0:
        return 0.0
    depth, text = 1, ""
    for character in completion[start + len(r"\boxed{") :]:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return float(_without_space(text) == _without_space(str(answer)))
        text += character
    return 0.0


def _without_space(text: str) -> str:
    return re.sub(r"\s", "", text)
