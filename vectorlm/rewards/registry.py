"""The rewards that a config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vectorlm.errors import ConfigError
from vectorlm.plugin import is_plugin, load_plugin
from vectorlm.rewards.countdown import countdown_reward
from vectorlm.settings import PositiveFloat, ReadIf, nearest

Reward = Callable[..., Any]
"""``reward(completion, **columns)``: the columns are those of the prompt; 1.0 stands for a right answer.

See `vectorlm.rewards.runner` for the other forms that reinforcement learning takes.
"""

_REWARDS: dict[str, Reward] = {"countdown": countdown_reward}


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Which rewards score a completion, and what happens when one fails."""

    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Weight of each reward function, by name or `file.py:NAME`."""
    reward_models: Mapping[str, Any] = field(default_factory=dict)
    """Weight of each sequence-classification model with one label, by folder."""
    reward_timeout_s: Annotated[PositiveFloat | None, ReadIf("rl.rewards")] = 300.0
    """Longest call of a reward function, in seconds; null waits without limit."""
    on_reward_error: Annotated[Literal["stop", "skip"], ReadIf("rl.rewards")] = "stop"
    """Whether a failing reward function ends the run, or its completion is left out."""


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
