"""Rewards: what a completion is worth."""

from vectorlm.rewards.registry import Reward, get_reward, reward_names
from vectorlm.tasks.countdown import countdown_reward
from vectorlm.tasks.problems import CountdownProblem, CountdownRules, generate_problems, solve

__all__ = [
    "CountdownProblem",
    "CountdownRules",
    "Reward",
    "countdown_reward",
    "generate_problems",
    "get_reward",
    "reward_names",
    "solve",
]
