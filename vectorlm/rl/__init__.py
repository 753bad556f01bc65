"""Reinforcement learning on rollouts from the engine."""
