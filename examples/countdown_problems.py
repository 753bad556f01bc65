"""Countdown problems: numbers, a target that they can reach, and an expression that reaches it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import product
from random import Random

from vectorlm.errors import DatasetError

OPERATORS = "+-*/"

_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATOM_STRENGTH = 3
_MAX_FRUITLESS_DRAWS = 20_000


@dataclass(frozen=True)
class CountdownRules:
    """Settings for drawing problems."""

    num_numbers: int = 3
    """Numbers per problem; the time to solve a problem is exponential in it, and short up to 5."""
    lowest: int = 1
    """The smallest number that may be drawn."""
    highest: int = 20
    """The largest number that may be drawn."""
    operators: str = "+-"
    """The operators that solutions may use, some of ``+-*/``."""
    max_target: int = 99
    """The largest target; the smallest is 1."""

    def __post_init__(self) -> None:
        if self.num_numbers < 1 or not 0 <= self.lowest <= self.highest or self.max_target < 1:
            raise DatasetError(
                f"{self} allows no problem: num_numbers and max_target must be at least 1, "
                "and lowest must lie between 0 and highest. Change them."
            )
        if not self.operators or set(self.operators) - set(OPERATORS):
            raise DatasetError(
                f"operators={self.operators!r} must be some of + - * /. Use for example '+-*'."
            )


@dataclass(frozen=True)
class CountdownProblem:
    """A prompt and its reference answer."""

    numbers: tuple[int, ...]
    """The numbers in the order of the prompt; each is used exactly once."""
    target: int
    """The value to reach."""
    solution: str
    """An expression over `numbers` that equals `target`."""

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Sorted numbers and target, which are equal for problems that differ only in the order of their numbers."""
        return tuple(sorted(self.numbers)), self.target

    @property
    def prompt(self) -> str:
        """The prompt as text."""
        return f"Using the numbers {', '.join(map(str, self.numbers))} make {self.target}."

    @property
    def completion(self) -> str:
        """The reference answer as the text that follows `prompt`."""
        return f" <answer>{self.solution}</answer>"


def generate_problems(
    num_train: int, num_eval: int, *, rules: CountdownRules, seed: int
) -> tuple[list[CountdownProblem], list[CountdownProblem]]:
    """Draw training and evaluation problems that share no ``(sorted numbers, target)``.

    Evaluation problems also differ from each other in that key; training problems may differ only in the order of
    their numbers. The same arguments give the same problems.

    Raises:
        DatasetError: `rules` allow too few different problems.
    """
    random = Random(f"countdown-{seed}")
    evaluation = _draw(num_eval, lambda problem: problem.key, random, rules, frozenset())
    held_out = frozenset(problem.key for problem in evaluation)
    train = _draw(num_train, lambda problem: (problem.numbers, problem.target), random, rules, held_out)
    return train, evaluation


def _draw(
    count: int,
    identity: Callable[[CountdownProblem], Hashable],
    random: Random,
    rules: CountdownRules,
    held_out: frozenset[Hashable],
) -> list[CountdownProblem]:
    """Draw `count` problems of different identity, none of them held out."""
    found: dict[Hashable, CountdownProblem] = {}
    num_fruitless = 0
    while len(found) < count:
        problem = _draw_one(random, rules)
        if problem is None or problem.key in held_out or identity(problem) in found:
            num_fruitless += 1
            if num_fruitless > _MAX_FRUITLESS_DRAWS:
                raise DatasetError(
                    f"{rules} allow about {len(found)} different problems, but {count} are asked for. "
                    "Ask for fewer, or raise num_numbers or highest."
                )
            continue
        num_fruitless = 0
        found[identity(problem)] = problem
    return list(found.values())


def _draw_one(random: Random, rules: CountdownRules) -> CountdownProblem | None:
    """Draw numbers, then one of the targets that they reach; return None if no target is in range."""
    numbers = tuple(random.randint(rules.lowest, rules.highest) for _ in range(rules.num_numbers))
    solutions = solve(numbers, rules.operators)
    targets = sorted(target for target in solutions if 1 <= target <= rules.max_target)
    if not targets:
        return None
    target = random.choice(targets)
    return CountdownProblem(numbers, target, solutions[target])


@lru_cache(maxsize=1 << 16)
def solve(numbers: tuple[int, ...], operators: str = OPERATORS) -> dict[int, str]:
    """Map every integer >= 0 that `numbers` reach to an expression that uses each number exactly once.

    The expression has the fewest parentheses, then divisions, then products. Among equals it adds before it
    subtracts and keeps the order of `numbers`. Intermediate values may be fractions but not negative; this
    excludes no target.
    """
    everything = (1 << len(numbers)) - 1
    tables: dict[int, _Table] = {}
    for subset in range(1, everything + 1):
        tables[subset] = _atoms(subset, numbers) or _best_forms(subset, tables, operators)
    return {int(value): form.text for value, form in tables[everything].items() if value == int(value)}


@dataclass(frozen=True, order=True)
class _Form:
    """An expression; `solve` prefers the smaller of two."""

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
    """Return the exact value, or None if it is negative or undefined."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right if left >= right else None
    if operator == "*":
        return left * right
    return Fraction(left) / right if right else None


def _join(left: _Form, operator: str, right: _Form) -> _Form:
    """Join two expressions, with parentheses only if precedence needs them."""
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
