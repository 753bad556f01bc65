"""The rewards that a config names."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from vectorlm.errors import ConfigError
from vectorlm.plugin import is_plugin, load_plugin
from vectorlm.settings import nearest

Reward = Callable[..., Any]
"""``reward(completion, **columns)``: the columns are those of the prompt; 1.0 stands for a right answer.

See `vectorlm.rl.rewards.runner` for the other forms that reinforcement learning takes.
"""

_HOME = "vectorlm.rl.rewards"
_REWARDS = {
    "boxed": f"{_HOME}.mathematics:boxed",
    "code": f"{_HOME}.code:code",
    "countdown": f"{_HOME}.countdown:countdown_reward",
    "format": f"{_HOME}.shape:format",
    "ifeval": f"{_HOME}.ifeval:ifeval",
    "json_schema": f"{_HOME}.shape:json_schema",
    "judge": f"{_HOME}.judge:judge",
    "length": f"{_HOME}.shape:length",
    "math": f"{_HOME}.mathematics:math",
    "reasoning_gym": f"{_HOME}.gym:reasoning_gym",
    "repetition": f"{_HOME}.shape:repetition",
}
_CALL = re.compile(r"(.*?\w)\((.*)\)", re.DOTALL)


def short_name(name: str) -> str:
    """Return what metrics call a reward: the function's name, or the last folder of a model's path."""
    return without_arguments(name).rpartition(":")[2].rstrip("/").rpartition("/")[2]


def without_arguments(name: str) -> str:
    """Return a reward's name without the arguments that may follow it."""
    call = _CALL.fullmatch(name)
    return name if call is None else call[1]


def reward_names() -> list[str]:
    """Return the names that `get_reward` knows, sorted."""
    return sorted(_REWARDS)


def get_reward(name: str) -> Reward:
    """Return the reward that a config calls `name`, or the one that ``file.py:NAME`` or ``module:NAME`` points to.

    Arguments may follow, all by name: ``format(tags=['think', 'answer'])``. They are Python's literals.
    """
    bare = without_arguments(name)
    place = _REWARDS.get(bare, bare)
    if not is_plugin(place):
        rule = f"it must be one of {', '.join(reward_names())}, or file.py:NAME of your own."
        raise ConfigError(f"unknown reward {name!r}: {rule} {nearest(bare, _REWARDS)}".rstrip())
    reward = load_plugin(place)
    if not callable(reward):
        raise ConfigError(f"reward {name!r} is a {type(reward).__name__}: it must be a function.")
    if bare == name:
        return reward
    try:
        call: Any = ast.parse(f"call{name[len(bare) :]}", mode="eval").body
        arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        if call.args or None in arguments:
            raise TypeError("each argument needs a name")
        inspect.signature(reward).bind_partial(**arguments)
    except (SyntaxError, ValueError, TypeError) as error:
        raise ConfigError(f"the arguments of the reward {name!r} cannot be taken: {error}.") from error
    return partial(reward, **arguments)
