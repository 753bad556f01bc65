"""The solution of a Countdown problem: one expression for every value that some numbers reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import product

OPERATORS = "+-*/"
"""The operators that a solution may use."""

_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATOM_STRENGTH = 3


@lru_cache(maxsize=1 << 16)
def solve(numbers: tuple[int, ...], operators: str = OPERATORS) -> dict[int, str]:
    """Map every whole number from 0 that `numbers` reach, each used exactly once, to one expression for it.

    Of several expressions the one with the fewest parentheses, divisions and products is kept, then the one
    that adds before it subtracts and keeps the order of `numbers`. Intermediate values may be fractions but
    not negative, which loses no target.
    """
    everything = (1 << len(numbers)) - 1
    tables: dict[int, _Table] = {}
    for subset in range(1, everything + 1):
        tables[subset] = _atoms(subset, numbers) or _best_forms(subset, tables, operators)
    return {int(value): form.text for value, form in tables[everything].items() if value == int(value)}


@dataclass(frozen=True, order=True)
class _Form:
    """An expression, ordered by how much it is preferred."""

    num_parentheses: int
    num_divisions: int
    num_products: int
    operators: str
    positions: tuple[int, ...]
    text: str = field(compare=False)
    strength: int = field(compare=False)


_Table = dict[Fraction | int, _Form]


def _atoms(subset: int, numbers: tuple[int, ...]) -> _Table:
    """Return the table of a subset of one number; empty for larger ones."""
    if subset.bit_count() != 1:
        return {}
    position = subset.bit_length() - 1
    text = str(numbers[position])
    return {numbers[position]: _Form(0, 0, 0, "", (position,), text, _ATOM_STRENGTH)}


def _best_forms(subset: int, tables: dict[int, _Table], operators: str) -> _Table:
    """Join the tables of every split of `subset` in two, keeping the preferred form of each value."""
    best: _Table = {}
    left = (subset - 1) & subset
    while left:
        pairs = product(tables[left].items(), tables[subset ^ left].items(), operators)
        for (left_value, left_form), (right_value, right_form), operator in pairs:
            value = _apply(operator, left_value, right_value)
            if value is None:
                continue
            form = _join(left_form, operator, right_form)
            if value not in best or form < best[value]:
                best[value] = form
        left = (left - 1) & subset
    return best


def _apply(operator: str, left: Fraction | int, right: Fraction | int) -> Fraction | int | None:
    """Return the exact value, or None where it is negative or undefined."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right if left >= right else None
    if operator == "*":
        return left * right
    return Fraction(left) / right if right else None


def _join(left: _Form, operator: str, right: _Form) -> _Form:
    """Write two forms as one, with parentheses only where precedence asks for them."""
    strength = _STRENGTH[operator]
    left_needs = left.strength < strength
    right_needs = right.strength <= strength
    left_text = f"({left.text})" if left_needs else left.text
    right_text = f"({right.text})" if right_needs else right.text
    return _Form(
        left.num_parentheses + right.num_parentheses + left_needs + right_needs,
        left.num_divisions + right.num_divisions + (operator == "/"),
        left.num_products + right.num_products + (operator == "*"),
        left.operators + operator + right.operators,
        left.positions + right.positions,
        left_text + operator + right_text,
        strength,
    )
