"""Rewards by name, and the parameters of reward functions."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from vectorlm.errors import ConfigError
from vectorlm.plugin import is_plugin, load_plugin
from vectorlm.settings import nearest

Reward = Callable[..., Any]
"""A function ``reward(completion, **columns)`` of the prompt's columns; 1.0 means a correct answer.

See `vectorlm.rl.rewards.runner` for the other forms.
"""

_HOME = "vectorlm.rl.rewards"
JUDGE, SELF, BASE = "judge", "self", "base"
"""Names of the judge, of the run's own engine as its model, and of the model without an adapter."""
_REWARDS = {
    "boxed": f"{_HOME}.mathematics:boxed",
    "code": f"{_HOME}.code:code",
    "countdown": f"{_HOME}.countdown:countdown_reward",
    "format": f"{_HOME}.shape:format",
    "ifeval": f"{_HOME}.shape:ifeval",
    "json_schema": f"{_HOME}.shape:json_schema",
    JUDGE: f"{_HOME}.judge:judge",
    "length": f"{_HOME}.shape:length",
    "math": f"{_HOME}.mathematics:math",
    "reasoning_gym": f"{_HOME}.mathematics:reasoning_gym",
    "repetition": f"{_HOME}.shape:repetition",
}
_CALL = re.compile(r"(.*?\w)\((.*)\)", re.DOTALL)


def short_name(name: str) -> str:
    """Return the name of a reward in metrics: the function's name, or the last folder of a model's path."""
    return without_arguments(name).rpartition(":")[2].rstrip("/").rpartition("/")[2]


def without_arguments(name: str) -> str:
    """Return a reward's name without the arguments that may follow it."""
    call = _CALL.fullmatch(name)
    return name if call is None else call[1]


def reward_names() -> list[str]:
    """Return the names of the built-in rewards, sorted."""
    return sorted(_REWARDS)


def get_reward(name: str) -> Reward:
    """Return a built-in reward, or the function at ``file.py:NAME`` or ``module:NAME``.

    Keyword arguments may follow, as Python literals: ``format(tags=['think', 'answer'])``.
    """
    bare = without_arguments(name)
    place = _REWARDS.get(bare, bare)
    if not is_plugin(place):
        rule = f"it must be one of {', '.join(reward_names())}, or file.py:NAME."
        raise ConfigError(f"unknown reward {name!r}: {rule} {nearest(bare, _REWARDS)}".rstrip())
    reward = load_plugin(place)
    if not callable(reward):
        raise ConfigError(f"reward {name!r} is a {type(reward).__name__}: it must be a function.")
    if bare == name:
        return reward
    try:
        call: Any = ast.parse(f"call{name[len(bare) :]}", mode="eval").body
        names = getattr(reward, "also_written", {})
        arguments = {
            names.get(keyword.arg, keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords
        }
        if call.args or None in arguments:
            raise TypeError("every argument needs a name")
        inspect.signature(reward).bind_partial(**arguments)
    except (SyntaxError, ValueError, TypeError) as error:
        raise ConfigError(f"the arguments of the reward {name!r} must fit it: {error}.") from error
    return partial(reward, **arguments)


def given_of(name: str) -> Mapping[str, Any]:
    """Return the arguments in a reward's name."""
    found: Mapping[str, Any] = getattr(get_reward(name), "keywords", {})
    return found


def adapter_of_judge(name: str) -> str | None:
    """Return the adapter that ``judge(model="self", …)`` asks; None for any other reward."""
    if without_arguments(name) != JUDGE:
        return None
    given = given_of(name)
    return str(given.get("adapter") or BASE) if given.get("model") == SELF else None


COMPLETION, COMPLETIONS, PROMPTS = "completion", "completions", "prompts"
OF_VERL = "solution_str"
"""verl's name of the parameter for the completion."""
IDS = ("completion_ids", "completions_ids")
OFFERED = {False: ("prompt", IDS[0]), True: (COMPLETIONS, PROMPTS, *IDS)}
"""Arguments besides columns, for a function of one completion (False) and for a function of lists (True)."""
RESERVED = (COMPLETION, "prompt", *OFFERED[True])
"""Names of parameters that never receive a column."""
LOG = "log"
EXTRAS = ("messages", "num_turns", "environment", LOG)
"""Arguments for parameters with exactly these names, if no column has the name; `LOG` takes precedence over columns."""
OF_TRL = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that only TRL's trainer passes."""


@dataclass(frozen=True)
class RewardSignature:
    """The parameters of a reward function."""

    takes_lists: bool
    """Whether it takes lists with one entry per completion, by name, and returns a list."""
    completion: str | None
    """Name of the parameter for the completion; None for a function of lists, and if there is none."""
    kinds: Mapping[str, Any]
    """Kind of every parameter, as in `inspect`, in order."""
    required: tuple[str, ...]
    """Names of the parameters without a default, besides the completion."""

    @classmethod
    def of(cls, reward: Callable[..., Any]) -> RewardSignature:
        """Read a function's parameters: `completions`, `prompts`, or token ids as the first parameter mean lists.

        A single completion is passed as the parameter `completion` or verl's `solution_str`, or else as the first
        parameter, unless its name has another meaning, such as `messages`.
        """
        parameters = inspect.signature(reward).parameters
        named = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
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
            name
            for name, parameter in named.items()
            if parameter.default is parameter.empty and name != completion
        )
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        return cls(takes_lists, completion, kinds, required)

    def call(
        self,
        reward: Callable[..., Any],
        offered: Mapping[str, Any],
        extras: Mapping[str, Any],
        completion: Any = None,
    ) -> Any:
        """Call the function with the completion, if it takes one, and the arguments that it accepts.

        Arguments that a `partial` sets take precedence over columns.
        """
        named = {name: value for name, value in extras.items() if name in self.kinds}
        # A column is not callable.
        own_log = {name: value for name, value in named.items() if name == LOG}
        offered = {**named, **offered, **own_log}
        takes_any = inspect.Parameter.VAR_KEYWORD in self.kinds.values()
        given = {
            name: value
            for name, value in offered.items()
            # Token ids have two names; ``**columns`` receives only the first.
            if name != self.completion and (name in self.kinds or (takes_any and name != IDS[1]))
        }
        if isinstance(reward, partial):
            given |= reward.keywords  # Arguments from the config.
        positional = [completion] if self._takes_by_place else []
        if self.completion is not None:
            given[self.completion] = completion
        by_place = [name for name, kind in self.kinds.items() if kind is inspect.Parameter.POSITIONAL_ONLY]
        positional += [given.pop(name) for name in by_place if name in given]
        return reward(*positional, **given)

    @property
    def _takes_by_place(self) -> bool:
        """Whether the completion is passed as ``*arguments``, or to a function without parameters, which raises."""
        first = next(iter(self.kinds.values()), inspect.Parameter.VAR_POSITIONAL)
        return not self.takes_lists and self.completion is None and first is inspect.Parameter.VAR_POSITIONAL

    @property
    def sees_completion(self) -> bool:
        """Whether any argument of the function depends on the completion."""
        named = self.kinds.keys() & {*EXTRAS, IDS[0]}
        return bool(self.takes_lists or self.completion or self._takes_by_place or named)

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Return the required parameters that receive neither a column nor another argument."""
        supplied = {*OFFERED[self.takes_lists], *EXTRAS, *columns}
        return [name for name in self.required if name not in supplied]
