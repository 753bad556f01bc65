"""The Countdown reward, for completions that reach a target with the given numbers."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

WRONG_REWARD = 0.1
"""Reward of a wrong or invalid expression in ``<answer>`` tags."""
MAX_CHARACTERS = 256
"""Maximum length of an expression; longer expressions are not parsed."""
MAX_DEPTH = 16
"""Maximum depth of parentheses."""

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def countdown_reward(completion: str, *, numbers: Sequence[int], target: int, **_columns: object) -> float:
    """Score one completion of a Countdown problem.

    The score is 1.0 if the last ``<answer>…</answer>`` is an expression of ``+ - * /`` and parentheses that equals
    `target` and uses each of `numbers` exactly once, in any order. It is `WRONG_REWARD` for any other answer, and 0.0
    without an answer. Other columns are ignored: you can pass a whole row.

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

    An expression has whole numbers, ``+ - * /`` and parentheses, but no sign before a number, no ``**`` and no ``//``.
    Nothing is executed: the function reads the syntax tree.

    Raises:
        ValueError: The text is not an expression of this form, is longer than `MAX_CHARACTERS`, has parentheses deeper
            than `MAX_DEPTH`, or divides by zero.
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
        # Python does not parse 007.
        return value_of(ast.parse(re.sub(r"\b0+(?=[0-9])", "", text), mode="eval").body), numbers
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not an expression: {error.msg}.") from error
    except ZeroDivisionError:
        raise ValueError("the expression divides by zero: use a divisor other than 0.") from None
