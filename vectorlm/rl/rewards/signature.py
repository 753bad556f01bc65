"""Which arguments a reward function takes, and which of them are required."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

COMPLETION, COMPLETIONS, PROMPTS = "completion", "completions", "prompts"
OF_VERL = "solution_str"
"""What verl calls the completion."""
IDS = ("completion_ids", "completions_ids")
OFFERED = {False: ("prompt", IDS[0]), True: (COMPLETIONS, PROMPTS, *IDS)}
"""What there is besides columns for a function of one completion, and for one of lists."""
RESERVED = (COMPLETION, "prompt", *OFFERED[True])
"""Names that never mean a column."""
LOG = "log"
EXTRAS = ("messages", "num_turns", "environment", LOG)
"""What a function gets only if it names it, and no column has that name; `LOG` also where a column has."""
OF_TRL = ("trainer_state", "log_extra", "log_metric", "environments")
"""What TRL's trainer passes of itself."""


@dataclass(frozen=True)
class RewardSignature:
    """The parameters of a reward function."""

    takes_lists: bool
    """Whether it takes lists with an entry for each completion, by name, and returns a list."""
    completion: str | None
    """The parameter that takes the one completion; None for lists, and for a function that does not name it."""
    kinds: Mapping[str, Any]
    """`inspect`'s kind of each parameter, in order."""
    required: tuple[str, ...]
    """Parameters without a default, besides the completion."""

    @classmethod
    def of(cls, reward: Callable[..., Any]) -> RewardSignature:
        """Read a function's parameters: `completions` or `prompts` means lists, and so do token ids in first place.

        One completion goes to the parameter `completion`, to verl's `solution_str`, or to the first one, unless that
        asks for something else, such as `messages`.
        """
        parameters = inspect.signature(reward).parameters
        named = {
            name: each
            for name, each in parameters.items()
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }
        first = next(iter(parameters.values()), None)
        is_open = first is not None and first.kind is first.VAR_KEYWORD
        own = next((name for name in (COMPLETION, OF_VERL) if name in named), None)
        takes_lists = COMPLETIONS in named or (
            own is None and (PROMPTS in named or is_open or next(iter(named), "") in IDS)
        )
        completion = None
        if not takes_lists and first is not None and first.kind is not first.VAR_POSITIONAL:
            completion = own or (None if first.name in (*EXTRAS, *OFFERED[False]) else first.name)
        required = tuple(
            name for name, each in named.items() if each.default is each.empty and name != completion
        )
        return cls(takes_lists, completion, {name: each.kind for name, each in parameters.items()}, required)

    def call(
        self,
        reward: Callable[..., Any],
        offered: Mapping[str, Any],
        extras: Mapping[str, Any],
        completion: Any = None,
    ) -> Any:
        """Call the function with the one completion, where it takes one, and what it accepts of what there is.

        Columns fill only what a `partial` leaves open.
        """
        named = {name: value for name, value in extras.items() if name in self.kinds}
        # A column cannot be called.
        own_log = {name: value for name, value in named.items() if name == LOG}
        offered = {**named, **offered, **own_log}
        takes_any = inspect.Parameter.VAR_KEYWORD in self.kinds.values()
        given = {
            name: value
            for name, value in offered.items()
            # A list is offered by two names; ``**columns`` gets it by one.
            if name != self.completion and (name in self.kinds or (takes_any and name != IDS[1]))
        }
        if isinstance(reward, partial):
            given |= reward.keywords  # What a config has written.
        positional = [completion] if self._takes_by_place else []
        if self.completion is not None:
            given[self.completion] = completion
        by_place = [name for name, kind in self.kinds.items() if kind is inspect.Parameter.POSITIONAL_ONLY]
        positional += [given.pop(name) for name in by_place if name in given]
        return reward(*positional, **given)

    @property
    def _takes_by_place(self) -> bool:
        """Whether the completion goes to ``*arguments``, or to a function that takes nothing, which then raises."""
        first = next(iter(self.kinds.values()), inspect.Parameter.VAR_POSITIONAL)
        return not self.takes_lists and self.completion is None and first is inspect.Parameter.VAR_POSITIONAL

    @property
    def sees_completion(self) -> bool:
        """Whether the function is shown anything of what was sampled."""
        named = self.kinds.keys() & {*EXTRAS, IDS[0]}
        return bool(self.takes_lists or self.completion or self._takes_by_place or named)

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Return the required parameters that neither these columns nor the completion itself can fill."""
        supplied = {*OFFERED[self.takes_lists], *EXTRAS, *columns}
        return [name for name in self.required if name not in supplied]
