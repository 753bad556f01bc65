"""The rewards by name, as a config spells them."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from vectorlm.errors import ConfigError
from vectorlm.rewards.countdown import countdown_reward

Reward = Callable[..., float]
"""``reward(completion, **columns)``: the columns are those of the question; 1.0 stands for a right answer."""

_REWARDS: dict[str, Reward] = {"countdown": countdown_reward}


def reward_names() -> list[str]:
    """Return the names that `get_reward` knows, sorted."""
    return sorted(_REWARDS)


def get_reward(name: str) -> Reward:
    """Return the reward that a config calls `name`.

    Raises:
        ConfigError: No reward has this name.
    """
    if name in _REWARDS:
        return _REWARDS[name]
    close = get_close_matches(name, _REWARDS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"unknown reward {name!r}: it must be one of {', '.join(reward_names())}.{hint}")
