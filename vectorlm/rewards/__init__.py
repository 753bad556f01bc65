"""Rewards: what a completion is worth."""

from vectorlm.rewards.countdown import countdown_reward
from vectorlm.rewards.registry import Reward, get_reward, reward_names

__all__ = [
    "Reward",
    "countdown_reward",
    "get_reward",
    "reward_names",
]
