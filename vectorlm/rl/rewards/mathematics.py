"""Rewards for the final answer: a formula, the text in a box, or the answer to a task from reasoning-gym."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache
from typing import Any

from vectorlm.rl.rewards.code import OverLimit, limited

# Otherwise every call warns that math-verify's time limits are off. They may be: the worker has a time limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def _drop(name: str, value: Any) -> None:
    """Log nothing."""


def math(
    completion: str, answer: str | float | None, log: Callable[[str, Any], None] = _drop
) -> float | None:
    r"""Return 1.0 if the completion's final formula equals the answer, else 0.0; None if the answer is not a formula.

    A formula that takes more than 3 s of CPU time to compare, such as ``9^{9^{9}}``, does not equal the answer.
    The formula is taken from ``\boxed{}``, from ``$...$``, or is the last number or expression of the text.
    *Source*: the package math-verify.

    Args:
        completion: The text of the model.
        answer: A number, an expression or LaTeX, with or without ``$``. None and NaN are no formulas.
        log: Receives the formula of the completion, as `answer`.
    """
    if (text := _text_of(answer)) is None:
        return None
    try:
        reward, found = limited("math_verify", f"{__name__}:compared", completion, text)
    except OverLimit:
        return 0.0
    if found is not None:
        log("answer", found)
    return None if reward is None else float(reward)


def compared(completion: str, answer: str) -> tuple[bool | None, str | None]:
    """Return whether the completion's final formula equals the answer, and that formula."""
    from math_verify import parse, verify

    # math-verify finds an expression such as x+1 only between dollars.
    gold = parse(f"${answer}$".replace("$$", "$"), parsing_timeout=None)
    if not gold:
        return None, None
    try:
        found = parse(completion, parsing_timeout=None)
        return verify(gold, found, timeout_seconds=None), str(found[0]) if found else None
    except Exception:  # Too many digits to print, or parentheses that are nested too deeply, for example.
        return False, None


def boxed(
    completion: str, answer: str | float | None, log: Callable[[str, Any], None] = _drop
) -> float | None:
    r"""Return 1.0 if the completion's last ``\boxed{}`` equals the answer without white space, else 0.0.

    The answer 5.0, a number, is ``5`` or ``5.0``. The reward is None if the answer is None or NaN.
    """
    if (right := _text_of(answer)) is None:
        return None
    start = completion.rfind(r"\boxed{")
    if start < 0:
        return 0.0
    depth, text = 1, ""
    for character in completion[start + len(r"\boxed{") :]:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            log("answer", _without_space(text))
            return float(_without_space(text) in map(_without_space, (right, str(answer))))
        text += character
    return 0.0


def _text_of(answer: str | float | None) -> str | None:
    """Return the answer as text, without an exponent or a final ``.0``; None if it is None or NaN."""
    if answer is None or answer != answer:
        return None
    return f"{Decimal(repr(answer)):f}".removesuffix(".0") if isinstance(answer, float) else str(answer)


def _without_space(text: str) -> str:
    return re.sub(r"\s", "", text)


def reasoning_gym(completion: str, item: Mapping[str, Any]) -> float:
    """Score the answer with the scorer of its task, from 0 to 1; some tasks reward partly correct answers.

    The answer is the text in the last ``<answer>`` tags, or else the whole text. The reward is 0 if the scorer cannot
    read the answer, or takes more than 3 s of CPU time.
    *Source*: the package reasoning-gym.

    Args:
        completion: The text of the model.
        item: The row of the task: ``question``, ``answer``, ``metadata``, and the task's settings ``config`` if they
            are not the defaults.
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

    config_text = json.dumps(item.get("config", {}), sort_keys=True)
    score, answer = _scorer(item["metadata"]["source_dataset"], config_text), extract_answer(completion)
    try:
        return score(completion.strip() if answer is None else answer, item)
    except BaseException:  # Some scorers evaluate the answer, which may call exit().
        score(item["answer"], item)
        return 0.0


@cache
def _scorer(task: str, config_text: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym.factory import create_dataset

    return create_dataset(task, **json.loads(config_text)).score_answer
