"""A guessing game of two players: one thinks of a number, the policy guesses it in `GUESSES` turns.

In a config: ``rl.environment: examples/guessing_game.py:Game``, which rewards each turn, or ``:RewardedLast``, which
gives the same points in all, with the last turn. The reward ``examples/guessing_game.py:won`` counts the games that are
won; with a weight of 0 it is measured and not learned from. `examples/make_chats.py` writes the games and a model to
start from.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vectorlm.rl.environments.environment import Reply

LOWEST, HIGHEST, GUESSES = 10, 41, 5


def asked(lowest: int, highest: int) -> str:
    """Return what the other player says before a guess."""
    return f"{lowest} to {highest}?"


class Game:
    """A turn earns a fifth of a point for each halving of the numbers that are left, so who wins has one point.

    It has coroutine functions alone, so that all games are in one process.
    """

    def __init__(self, number: int) -> None:
        """Think of `number`."""
        self.number = number
        self.lowest, self.highest = LOWEST, HIGHEST
        self.num_guesses = 0

    async def step(self, message) -> Reply:
        """Return what is left to guess."""
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
    """The same game, whose points come with the last turn."""

    points = 0.0

    async def step(self, message) -> Reply:
        """Return the reply with no reward before the game has ended."""
        reply = await super().step(message)
        self.points += reply.reward
        return replace(reply, reward=self.points if reply.done else None)


def won(completion, environment) -> float:
    """Return 1.0 if the number was found, else 0.0."""
    return environment.get("won", 0.0)
