"""The checks of the contracts; docs/engines.md and docs/contracts.md show how to run them on your own engine."""

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType

from vectorlm.testing import answers, language, updates
from vectorlm.testing.failures import speaking
from vectorlm.testing.subject import EngineUnderTest
from vectorlm.testing.trainers import TRAINER_CHECKS, TrainerUnderTest

__all__ = [
    "CHECKS",
    "MODEL_CHECKS",
    "TRAINER_CHECKS",
    "Check",
    "EngineUnderTest",
    "TrainerUnderTest",
    "run_checks",
]

Check = Callable[[EngineUnderTest], None]
"""Raises `AssertionError` where the engine breaks the contract; all ranks call it."""


def _checks_of(module: ModuleType) -> tuple[Check, ...]:
    """Return the public functions of a module, in the order of its lines."""
    functions = inspect.getmembers_static(module, inspect.isfunction)
    own = [check for name, check in functions if check.__module__ == module.__name__ and name[0] != "_"]
    return tuple(map(speaking, sorted(own, key=lambda check: check.__code__.co_firstlineno)))


MODEL_CHECKS: tuple[Check, ...] = _checks_of(language)
"""The checks that a scripted engine cannot pass."""

CHECKS: tuple[Check, ...] = (*_checks_of(answers), *MODEL_CHECKS, *_checks_of(updates))
"""All checks of an engine. The first needs a fresh engine, and the last closes it."""


def run_checks(subject: EngineUnderTest, checks: Sequence[Check] = CHECKS) -> None:
    """Run the checks on one engine, on every rank.

    Raises:
        AssertionError: A check failed; the text names it, the line that failed and the values in it.
    """
    for check in checks:
        try:
            speaking(check)(subject)
        except Exception as error:
            raise AssertionError(f"{check.__name__}: {type(error).__name__}: {error}") from error
