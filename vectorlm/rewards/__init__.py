"""Rewards: what a completion is worth."""

from vectorlm.rewards.countdown import countdown_reward
from vectorlm.rewards.problems import CountdownProblem, CountdownRules, generate_problems
from vectorlm.rewards.registry import Reward, get_reward, reward_names
from vectorlm.rewards.solver import solve

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
