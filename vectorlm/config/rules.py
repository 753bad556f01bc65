"""The rules that a single value can be held to, as annotations for the schema's types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Rule:
    """What a value must be beyond its type; put into ``Annotated[type, Rule(...)]``."""

    text: str
    """Completes the sentence "the value must be ..."."""
    holds: Callable[[Any], bool]
    """Whether a value of the right type keeps the rule."""
    example: str = ""
    """A value that does, as it is written in YAML; empty where the rule says it all."""


@dataclass(frozen=True)
class AlsoWritten:
    """Other spellings of a value, each with the spelling that it stands for."""

    spellings: Mapping[str, str]
    """From the accepted spelling to the one that the resolved config holds."""


def _at_least(minimum: int) -> Rule:
    return Rule(f"an integer >= {minimum}", lambda value: value >= minimum, str(minimum))


def _is_beta_pair(values: tuple[float, float]) -> bool:
    return all(0 <= value < 1 for value in values)


PositiveInt = Annotated[int, _at_least(1)]
NonNegativeInt = Annotated[int, _at_least(0)]
Seed = Annotated[
    # NumPy's generators take 32 bits; a larger seed would fail in every rank, after the launch.
    int, Rule("an integer from 0 to 4294967295", lambda value: 0 <= value < 2**32, "11")
]
PositiveFloat = Annotated[float, Rule("a finite number > 0", lambda value: 0 < value < math.inf, "1.0")]
NonNegativeFloat = Annotated[float, Rule("a finite number >= 0", lambda value: 0 <= value < math.inf, "0.1")]
ClippingNorm = Annotated[
    float, Rule("a number > 0 (.inf turns clipping off)", lambda value: value > 0, "1.0")
]
UnitInterval = Annotated[float, Rule("a number from 0 to 1", lambda value: 0 <= value <= 1, "0.05")]
Fraction = Annotated[float, Rule("a number > 0 and <= 1", lambda value: 0 < value <= 1, "0.25")]
Betas = Annotated[
    tuple[float, float], Rule("a list of two numbers, each >= 0 and < 1", _is_beta_pair, "[0.9, 0.95]")
]
Text = Annotated[str, Rule("text that is not blank", lambda value: bool(value.strip()))]
PromptSource = Annotated[
    str | tuple[str, ...],
    Rule(
        "a list of texts, none of them empty, or the path of a JSONL file",
        lambda value: bool(value) and all(value),
        "data/prompts.jsonl",
    ),
]
