"""Rewards: what a completion is worth."""

from vectorlm.rewards.registry import Reward, get_reward, reward_names
from vectorlm.tasks.countdown import countdown_reward

__all__ = [
    "Reward",
    "countdown_reward",
    "get_reward",
    "reward_names",
]
