"""Checks of the contracts. docs/howto/own_backend.md and docs/contracts.md show how to run them."""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from vectorlm.sampling.testing import answers, language, updates
from vectorlm.sampling.testing.subject import EngineUnderTest
from vectorlm.sampling.testing.updates import TrainerUnderTest

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
"""A function that raises `AssertionError` if the engine breaks the contract; all ranks call it."""

_SHOWN_CHARACTERS = 200


def _with_messages(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Add the failed line and its values to errors of `check`: outside pytest a bare `assert` has no message."""

    @functools.wraps(check)
    def checked(subject: Any) -> None:
        try:
            check(subject)
        except AssertionError as error:
            if str(error):
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            first = place.lineno or 0
            lines = range(first, (place.end_lineno or first) + 1)
            source = " ".join(linecache.getline(place.filename, line).strip() for line in lines)
            # Without the subject, which has whole engines in its repr.
            values = [
                f"{name} = {repr(value)[:_SHOWN_CHARACTERS]}"
                for name, value in frame.f_locals.items()
                if name != "subject" and re.search(rf"\b{name}\b", source)
            ]
            raise AssertionError("; ".join([source, *values])) from error

    return checked


def _checks_of(module: ModuleType, subject: type = EngineUnderTest) -> tuple[Callable[[Any], None], ...]:
    """Return the public functions of a module that take a `subject`, in the order of its lines."""
    functions = [check for _, check in inspect.getmembers_static(module, inspect.isfunction)]
    own = [check for check in functions if check.__annotations__.get("subject") == subject.__name__]
    own = [check for check in own if check.__module__ == module.__name__ and check.__name__[0] != "_"]
    return tuple(map(_with_messages, sorted(own, key=lambda check: check.__code__.co_firstlineno)))


MODEL_CHECKS: tuple[Check, ...] = _checks_of(language)
"""The checks that need a model; a scripted engine cannot pass them."""

CHECKS: tuple[Check, ...] = (*_checks_of(answers), *MODEL_CHECKS, *_checks_of(updates))
"""All checks of an engine. The first needs a new engine; the last one closes it."""

TRAINER_CHECKS: tuple[Callable[[TrainerUnderTest], None], ...] = _checks_of(updates, TrainerUnderTest)
"""All checks of a trainer, in any order; all ranks call them."""


def run_checks(subject: EngineUnderTest, checks: Sequence[Check] = CHECKS) -> None:
    """Run the checks on one engine, on every rank.

    Raises:
        AssertionError: A check failed; the text names it, the line that failed and the values in it.
    """
    for check in checks:
        try:
            _with_messages(check)(subject)
        except Exception as error:
            raise AssertionError(f"{check.__name__}: {type(error).__name__}: {error}") from error
