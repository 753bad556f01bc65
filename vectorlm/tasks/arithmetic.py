"""Arithmetic expressions, parsed exactly and never evaluated as code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 256
"""Longer expressions are refused before they are parsed."""
MAX_DEPTH = 16
"""Deeper parentheses are refused."""

_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")


@dataclass(frozen=True)
class Evaluation:
    """The value of an expression."""

    value: Fraction
    """Its exact value."""
    numbers: tuple[int, ...]
    """The numbers written in it, from left to right, repetitions included."""


def evaluate(expression: str) -> Evaluation:
    """Evaluate whole numbers joined by ``+ - * /`` with parentheses, in exact fractions.

    The grammar has only the four binary operators: no sign before a number, no ``**``, no ``//``. Spaces and newlines
    between tokens are allowed.

    Raises:
        ValueError: The text is not such an expression, is longer than `MAX_CHARACTERS`, too deep, or divides by zero.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(
            f"an expression of {len(expression)} characters is too long: keep it within {MAX_CHARACTERS}."
        )
    parser = _Parser(_tokens(expression))
    value = parser.parse()
    return Evaluation(value, tuple(int(token) for token in parser.tokens if token.isdigit()))


def _tokens(expression: str) -> list[str]:
    text, tokens, position = expression.rstrip(), [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            rest = text[position:].lstrip()
            raise ValueError(
                f"{rest[0]!r} is not arithmetic: use only whole numbers, + - * / and parentheses."
            )
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent: a sum of products of atoms."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self._position = 0
        self._depth = 0

    def parse(self) -> Fraction:
        value = self._sum()
        if self._position < len(self.tokens):
            raise ValueError(f"{self._take()!r} stands where an operator or the end belongs: remove it.")
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next_is("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value += sign * self._product()
        return value

    def _product(self) -> Fraction:
        value = self._atom()
        while self._next_is("*", "/"):
            if self._take() == "*":
                value *= self._atom()
                continue
            divisor = self._atom()
            if divisor == 0:
                raise ValueError("the expression divides by zero: use a divisor other than 0.")
            value /= divisor
        return value

    def _atom(self) -> Fraction:
        token = self._take()
        if token.isdigit():
            return Fraction(int(token))
        if token != "(":
            raise ValueError(f"{token!r} stands where a number or '(' belongs: put a number there.")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"parentheses are nested deeper than {MAX_DEPTH}: use fewer.")
        value = self._sum()
        if self._take() != ")":
            raise ValueError("a '(' is not closed: add the missing ')'.")
        self._depth -= 1
        return value

    def _next_is(self, *choices: str) -> bool:
        return self._position < len(self.tokens) and self.tokens[self._position] in choices

    def _take(self) -> str:
        if self._position == len(self.tokens):
            raise ValueError("the expression ends too early: a number or ')' is missing.")
        self._position += 1
        return self.tokens[self._position - 1]
