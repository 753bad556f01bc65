"""What settings dataclasses are written with: rules on single values, and how one dataclass nests another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, get_args


@dataclass(frozen=True)
class Rule:
    """What a value must be besides its type, in ``Annotated[type, Rule(...)]``."""

    text: str
    """Completes the sentence "the value must be ..."."""
    holds: Callable[[Any], bool]
    example: str = ""
    """A valid value, as it is written in YAML; empty where the text says enough."""


@dataclass(frozen=True)
class AlsoWritten:
    """Other accepted spellings of a value, mapped to those that the resolved config holds."""

    spellings: Mapping[str, str]


@dataclass(frozen=True)
class ReadIf:
    """When a setting is read at all, in ``Annotated[type, ReadIf(...)]``; elsewhere a value of its own is refused."""

    path: str
    """Another setting, from the top of the config."""
    values: tuple[Any, ...] = ()
    """What it must be; when empty, anything but null, false, 0 and an empty section. Then a file that turns the other
    setting off in so many words may keep this one."""
    fix: str = ""
    """What to do instead; empty for leaving it out, or setting the other."""


def _at_least(minimum: int) -> Rule:
    return Rule(f"an integer >= {minimum}", lambda value: value >= minimum, str(minimum))


def _is_beta_pair(values: tuple[float, float]) -> bool:
    return all(0 <= value < 1 for value in values)


PositiveInt = Annotated[int, _at_least(1)]
Length = Annotated[
    int, Rule("an integer >= 1, or -1 for the model's own", lambda value: value >= 1 or value == -1, "1024")
]
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
SaveFrequency = Annotated[
    float,
    Rule(
        "a share of an epoch (> 0 and <= 1), or an integer > 1 of optimizer steps",
        lambda value: 0 < value <= 1 or (value > 1 and float(value).is_integer()),
        "0.25 or 100",
    ),
]
Betas = Annotated[
    tuple[float, float], Rule("a list of two numbers, each >= 0 and < 1", _is_beta_pair, "[0.9, 0.95]")
]
Text = Annotated[str, Rule("text that is not blank", lambda value: bool(value.strip()))]
AlwaysFalse = Annotated[
    bool, Rule("false: no step of training is differentiated through", lambda value: not value, "false")
]
PromptSource = Annotated[
    str | tuple[str, ...],
    Rule(
        "a list of texts, none of them empty, or the path of a JSONL or Parquet file or of a saved dataset",
        lambda value: bool(value) and all(value),
        "data/prompts.jsonl",
    ),
]


def inline(section: type | None = None) -> Any:
    """Declare a dataclass field whose keys stand in the surrounding section; `section` supplies a default."""
    metadata = {"inline": True}
    return field(metadata=metadata) if section is None else field(default_factory=section, metadata=metadata)


def partial(section: type, null: str) -> Any:
    """Declare a mapping of the given keys of `section`, all optional, which stand in the surrounding section.

    `null` says where the value of a key comes from that is null or missing.
    """
    return field(default_factory=dict, metadata={"partial": section, "null": null})


def require_choice(name: str, value: str, kind: Any) -> None:
    """Raise ValueError where `value` is none of the names of the Literal `kind`."""
    if value not in get_args(kind):
        raise ValueError(f"{name}={value!r} is not known: it must be one of {', '.join(get_args(kind))}.")


def nearest(name: str, known: Iterable[str]) -> str:
    """Ask for the known name that is most like `name`; empty where none is."""
    near = get_close_matches(name, list(known), n=1)
    return f"Did you mean {near[0]!r}?" if near else ""
