"""The Countdown reward: does a completion reach the target with the given numbers?"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

WRONG_REWARD = 0.1
"""The reward of an answer in the right format with wrong numbers or a wrong value."""
MAX_CHARACTERS = 256
"""Longer expressions are refused before they are parsed."""
MAX_DEPTH = 16
"""Deeper parentheses are refused."""

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def countdown_reward(completion: str, *, numbers: Sequence[int], target: int, **_columns: object) -> float:
    """Score one completion of a Countdown problem.

    1.0 when the last ``<answer>…</answer>`` is an expression over ``+ - * /`` and parentheses that uses each
    of `numbers` exactly once, whatever their order, and equals `target`; `WRONG_REWARD` for any other answer;
    0.0 without an answer. Other columns are ignored, so that a whole row can be passed.

    *Source*: the rule of the TinyZero reproduction (Pan et al. 2025), with exact fractions and no ``eval``.
    """
    answers = _ANSWER.findall(completion)
    if not answers:
        return 0.0
    try:
        value, used = evaluate(answers[-1])
    except ValueError:
        return WRONG_REWARD
    return 1.0 if sorted(used) == sorted(numbers) and value == target else WRONG_REWARD


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression, and the numbers written in it from left to right.

    Whole numbers may be joined by ``+ - * /`` with parentheses; there is no sign before a number, no ``**`` and no
    ``//``. Nothing is executed: the syntax tree is read.

    Raises:
        ValueError: The text is not such an expression, is longer than `MAX_CHARACTERS`, has parentheses deeper than
            `MAX_DEPTH`, or divides by zero.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(
            f"an expression of {len(expression)} characters is too long: keep it within {MAX_CHARACTERS}."
        )
    text = " ".join(expression.split())
    if not re.fullmatch(r"[0-9+\-*/() ]+", text):
        raise ValueError(f"{text!r} is not arithmetic: use only whole numbers, + - * / and parentheses.")
    if max(accumulate((letter == "(") - (letter == ")") for letter in text)) > MAX_DEPTH:
        raise ValueError(f"parentheses are nested deeper than {MAX_DEPTH}: use fewer.")
    numbers: list[int] = []

    def value_of(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)):
                numbers.append(number)
                return Fraction(number)
            case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
                return _OPERATORS[type(sign)](value_of(left), value_of(right))
        raise ValueError(f"{text!r} needs a number or a parenthesis on both sides of each of + - * /.")

    try:
        # Python refuses 007.
        return value_of(ast.parse(re.sub(r"\b0+(?=[0-9])", "", text), mode="eval").body), numbers
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not an expression: {error.msg}.") from error
    except ZeroDivisionError:
        raise ValueError("the expression divides by zero: use a divisor other than 0.") from None
