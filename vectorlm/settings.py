"""Building blocks of settings dataclasses: types with rules, and fields that nest other dataclasses."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, get_args

from annotated_types import Predicate
from pydantic import BeforeValidator, Field

from vectorlm.errors import ConfigError

VARIABLE = re.compile(r"\$(\{|[A-Za-z_])")
"""Matches a shell variable in a path."""


def also_written(spellings: Mapping[Any, str]) -> BeforeValidator:
    """Accept other spellings of a text and replace them by the standard spellings."""
    return BeforeValidator(
        lambda value: spellings.get(value, value) if isinstance(value, str | bool) else value
    )


@dataclass(frozen=True)
class ReadIf:
    """Condition for a setting to have an effect, in ``Annotated[type, ReadIf(...)]``; otherwise a value is an error."""

    path: str
    """Path of another setting."""
    values: tuple[Any, ...] = ()
    """Values of the other setting; if empty, any truthy value. In that case a file may also set this setting and
    explicitly turn the other one off."""
    fix: str = ""
    """The advice in the error; if empty, to leave this setting out or to set the other one."""
    also: tuple[str, ...] = ()
    """Paths of further settings; any truthy one is enough."""


# The description of a type completes the sentence "the value must be ..."; examples are YAML.
PositiveInt = Annotated[int, Field(ge=1, description="an integer >= 1", examples=["1"])]
NonNegativeInt = Annotated[int, Field(ge=0, description="an integer >= 0", examples=["0"])]
Length = Annotated[
    int,
    Predicate(lambda value: value >= 1 or value == -1),
    Field(description="an integer >= 1, or -1 for the model's own", examples=["1024"]),
]
# NumPy takes 32 bits; a larger seed would fail in every rank after the launch.
Seed = Annotated[int, Field(ge=0, lt=2**32, description="an integer from 0 to 4294967295", examples=["11"])]
PositiveFloat = Annotated[
    float, Field(gt=0, lt=math.inf, description="a finite number > 0", examples=["1.0"])
]
NonNegativeFloat = Annotated[
    float, Field(ge=0, lt=math.inf, description="a finite number >= 0", examples=["0.1"])
]
LearningRate = Annotated[
    float, Field(ge=0, lt=math.inf, description="a finite number >= 0", examples=["1.0e-5"])
]
ClippingNorm = Annotated[
    float, Field(gt=0, description="a number > 0 (.inf turns clipping off)", examples=["1.0"])
]
UnitInterval = Annotated[float, Field(ge=0, le=1, description="a number from 0 to 1", examples=["0.05"])]
Fraction = Annotated[float, Field(gt=0, le=1, description="a number > 0 and <= 1", examples=["0.25"])]
SaveFrequency = Annotated[
    float,
    Predicate(lambda value: 0 < value <= 1 or (value > 1 and float(value).is_integer())),
    Field(
        description="a share of an epoch (> 0 and <= 1), or an integer > 1 of optimizer steps",
        examples=["0.25 or 100"],
    ),
]
Betas = Annotated[
    tuple[float, float],
    Predicate(lambda values: all(0 <= value < 1 for value in values)),
    Field(strict=False, description="a list of two numbers, each >= 0 and < 1", examples=["[0.9, 0.95]"]),
]
Text = Annotated[
    str, Predicate(lambda value: bool(value.strip())), Field(description="text that is not blank")
]
PathText = Annotated[
    str,
    BeforeValidator(lambda value: os.path.expanduser(value) if isinstance(value, str) else value),
    Predicate(lambda value: bool(value.strip()) and not VARIABLE.search(value)),
    Field(description="a path without variables such as $HOME"),
]
RewardWeights = Annotated[
    Mapping[str, Any],
    BeforeValidator(
        lambda given: (
            dict.fromkeys([given] if isinstance(given, str) else given, 1.0)
            if isinstance(given, str | list | tuple)
            else given
        )
    ),
    Field(description="a mapping of rewards to weights, or a list of rewards", examples=["{countdown: 1.0}"]),
]
Separator = Annotated[str, Field(min_length=1, description="a text", examples=['"\\n"'])]


def as_path(value: str, setting: str) -> str:
    """Return a path with ~ expanded; raise `ConfigError` if it contains a variable."""
    if VARIABLE.search(value):
        raise ConfigError(f"{setting}={value!r} must be a path without variables. Write the full path.")
    return os.path.expanduser(value)


def inline(section: type | None = None) -> Any:
    """Declare a field whose keys are keys of the surrounding section; `section` supplies a default."""
    metadata = {"inline": True}
    return field(metadata=metadata) if section is None else field(default_factory=section, metadata=metadata)


def partial(*sections: type, null: str) -> Any:
    """Declare a field for the keys of `sections`; they are optional keys of the surrounding section.

    `null` describes the value of a key that is null or missing.
    """
    return field(default_factory=dict, metadata={"partial": sections, "null": null})


def other_keys() -> Any:
    """Declare a field for all keys that the section does not declare."""
    return field(default_factory=dict, metadata={"other_keys": True})


def require_choice(name: str, value: str, kind: Any) -> None:
    """Raise ValueError unless `value` is one of the Literal `kind`."""
    if value not in get_args(kind):
        rule = f"is not known: it must be one of {', '.join(get_args(kind))}."
        raise ValueError(f"{name}={value!r} {rule} {nearest(str(value), get_args(kind))}".rstrip())


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `name`, ignoring case; None if no name is similar."""
    names = {known_name.casefold(): known_name for known_name in known}
    near = get_close_matches(name.casefold(), names)
    # Prefer the same letters: gpro is grpo, not gspo.
    near.sort(key=lambda candidate: sorted(candidate) != sorted(name.casefold()))
    return names[near[0]] if near else None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean ...?" with the most similar known name; empty without one."""
    near = closest(name, known)
    return "" if near is None else f"Did you mean {near!r}?"
