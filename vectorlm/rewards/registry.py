"""The rewards that a config names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vectorlm.errors import ConfigError
from vectorlm.plugin import is_plugin, load_plugin
from vectorlm.rewards.countdown import countdown_reward
from vectorlm.settings import nearest

Reward = Callable[..., Any]
"""``reward(completion, **columns)``: the columns are those of the prompt; 1.0 stands for a right answer.

See `vectorlm.rewards.runner` for the other forms that reinforcement learning takes.
"""

_REWARDS: dict[str, Reward] = {"countdown": countdown_reward}


def short_name(name: str) -> str:
    """Return what metrics call a reward: the function's name, or the last folder of a model's path."""
    return name.rpartition(":")[2].rstrip("/").rpartition("/")[2]


def reward_names() -> list[str]:
    """Return the names that `get_reward` knows, sorted."""
    return sorted(_REWARDS)


def get_reward(name: str) -> Reward:
    """Return the reward that a config calls `name`, or the one that ``file.py:NAME`` or ``module:NAME`` points to."""
    if name in _REWARDS:
        return _REWARDS[name]
    if is_plugin(name):
        reward = load_plugin(name)
        if not callable(reward):
            raise ConfigError(f"reward {name!r} is a {type(reward).__name__}: it must be a function.")
        return reward
    rule = f"it must be one of {', '.join(reward_names())}, or file.py:NAME of your own."
    raise ConfigError(f"unknown reward {name!r}: {rule} {nearest(name, _REWARDS)}".rstrip())
