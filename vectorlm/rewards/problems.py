"""The Countdown problem: numbers, a target that they can reach, and one way to reach it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from random import Random

from vectorlm.errors import DatasetError
from vectorlm.rewards.solver import OPERATORS, solve

_MAX_FRUITLESS_DRAWS = 20_000


@dataclass(frozen=True)
class CountdownRules:
    """Which problems may be drawn."""

    num_numbers: int = 3
    """Numbers per problem; solving takes time exponential in it, 5 is comfortable."""
    lowest: int = 1
    """The smallest number that may be drawn."""
    highest: int = 20
    """The largest number that may be drawn."""
    operators: str = "+-"
    """The operators that solutions may use, out of ``+-*/``."""
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
    """One question and its reference answer."""

    numbers: tuple[int, ...]
    """The numbers in the order that the question names them; each is used exactly once."""
    target: int
    """The value to reach."""
    solution: str
    """An expression over `numbers` that equals `target`."""

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """What makes two problems the same whatever the order of their numbers."""
        return tuple(sorted(self.numbers)), self.target

    @property
    def prompt(self) -> str:
        """The question as text."""
        return f"Using the numbers {', '.join(map(str, self.numbers))} make {self.target}."

    @property
    def completion(self) -> str:
        """The reference answer as the text that follows `prompt`."""
        return f" <answer>{self.solution}</answer>"


def generate_problems(
    num_train: int, num_eval: int, *, rules: CountdownRules, seed: int
) -> tuple[list[CountdownProblem], list[CountdownProblem]]:
    """Draw training and evaluation problems that share no ``(sorted numbers, target)``.

    Evaluation problems also differ from one another by that key; training problems differ by the order of
    their numbers too. The same arguments give the same problems.

    Raises:
        DatasetError: `rules` do not allow so many different problems.
    """
    random = Random(f"countdown-{seed}")
    evaluation = _draw(num_eval, _unordered, random, rules, frozenset())
    held_out = frozenset(_unordered(problem) for problem in evaluation)
    return _draw(num_train, _ordered, random, rules, held_out), evaluation


def _unordered(problem: CountdownProblem) -> Hashable:
    return problem.key


def _ordered(problem: CountdownProblem) -> Hashable:
    return problem.numbers, problem.target


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
        if problem is None or _unordered(problem) in held_out or identity(problem) in found:
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
    """Draw numbers, then one of the targets that they reach; None when they reach none in range."""
    numbers = tuple(random.randint(rules.lowest, rules.highest) for _ in range(rules.num_numbers))
    solutions = solve(numbers, rules.operators)
    targets = sorted(target for target in solutions if 1 <= target <= rules.max_target)
    if not targets:
        return None
    target = random.choice(targets)
    return CountdownProblem(numbers, target, solutions[target])
