"""A guessing game: the environment thinks of a number, and the policy guesses it in at most `GUESSES` turns.

In a config: ``rl.environment: examples/guessing_game.py:Game``, which rewards each turn, or ``:RewardedLast``, which
gives the sum of these rewards in the last turn. The reward ``examples/guessing_game.py:won`` is 1 for a won game; with
a weight of 0 it is only measured. `examples/make_chats.py` writes the games and a start model.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vectorlm.rl.environments.environment import Reply

LOWEST, HIGHEST, GUESSES = 10, 41, 5


def asked(lowest: int, highest: int) -> str:
    """Return the environment's message before a guess."""
    return f"{lowest} to {highest}?"


class Game:
    """A game that gives a fifth of a point for each halving of the numbers that are left; a win has one point in all.

    Its `step` is asynchronous, and therefore all games share one process.
    """

    def __init__(self, number: int) -> None:
        """Start a game about `number`."""
        self.number = number
        self.lowest, self.highest = LOWEST, HIGHEST
        self.num_guesses = 0

    async def step(self, message) -> Reply:
        """Return the reply to a guess, with the range that is left."""
        self.num_guesses += 1
        said = message["content"]
        guess = int(said) if said.isascii() and said.isdigit() else None
        has_won = guess == self.number
        before = self.highest - self.lowest + 1
        if guess is not None and guess < self.number:
            self.lowest = max(self.lowest, guess + 1)
        elif guess is not None and guess > self.number:
            self.highest = min(self.highest, guess - 1)
        left = 1 if has_won else self.highest - self.lowest + 1
        return Reply(
            [{"role": "user", "content": asked(self.lowest, self.highest)}],
            reward=math.log2(before / left) / 5,
            done=has_won or self.num_guesses == GUESSES,
            metrics={"won": has_won, "guesses": self.num_guesses},
        )


class RewardedLast(Game):
    """The same game, with all points in the last turn."""

    points = 0.0

    async def step(self, message) -> Reply:
        """Return the reply, without a reward before the last turn."""
        reply = await super().step(message)
        self.points += reply.reward
        return replace(reply, reward=self.points if reply.done else None)


def won(completion, environment) -> float:
    """Return 1.0 if the number was found, else 0.0."""
    return environment.get("won", 0.0)
