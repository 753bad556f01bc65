"""Nim by self-play: two players alternately take one to three sticks, and the player who takes the last stick wins.

A player reads the number of sticks, and answers with the number that is left after the move.

In a config: ``rl.environment: examples/nim.py:Nim``. A row's `opponent` is ``self`` or ``fixed``. The first is an older
policy of the run, which the engine keeps as an adapter. The second plays at random but never misses a win. The callback
``examples/nim.py:WinRate`` logs the share of games that an evaluation won as ``eval/win_rate``. `examples/make_nim.py`
writes the games and a start model.
"""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from typing import Any

from vectorlm.rl.environments.environment import Reply

MOST = 3
"""Largest number of sticks that a player may take in a move."""


def left_by(text: str, num_left: int) -> int | None:
    """Return the number of sticks after a player's move; None if the text is not a legal move."""
    left = int(text) if text.isascii() and text.isdigit() else -1
    return left if 0 <= left < num_left <= left + MOST else None


def fixed_move(num_left: int, draw: random.Random) -> int:
    """Return the number of sticks after a move of the fixed opponent."""
    return 0 if num_left <= MOST else num_left - draw.randint(1, MOST)


class Nim:
    """A game that the policy begins; an illegal move loses.

    Its `step` is asynchronous, and therefore all games share one process.
    """

    def __init__(self, sticks: int, opponent: str, game: int, client_url: str = "", key: str = "") -> None:
        """Start with `sticks`; `client_url` and `key` give access to the run's engine, which samples the opponent."""
        self.num_left, self.opponent = sticks, opponent
        self.draw = random.Random(game)
        self.client_url, self.key = client_url, key
        self.model = ""
        self.chat: list[dict[str, str]] = []
        """The game as the older policy sees it."""

    async def step(self, message: dict[str, Any]) -> Reply:
        """Make the policy's move and the opponent's; return the reply with the sticks that are left."""
        left = left_by(message["content"], self.num_left)
        if not left:
            return self.ended(has_won=left == 0)
        if self.opponent == "fixed":
            self.num_left = fixed_move(left, self.draw)
        else:
            answer = left_by(await self.older_self(str(left)), left)
            if answer is None:
                return self.ended(has_won=True)
            self.num_left = answer
        if not self.num_left:
            return self.ended(has_won=False)
        return Reply([{"role": "user", "content": str(self.num_left)}])

    def ended(self, has_won: bool) -> Reply:
        """Return the last reply of the game."""
        return Reply(reward=float(has_won), done=True, metrics={"acc": has_won})

    async def older_self(self, said: str) -> str:
        """Return the answer of an older policy, the same one in all turns of a game."""
        if not self.model:
            names = [card["id"] for card in (await self.ask("/models"))["data"]]
            older = [name for name in names if name.startswith("policy@")]
            self.model = self.draw.choice(older or ["reference"])
        self.chat.append({"role": "user", "content": said})
        answer = await self.ask("/chat/completions", model=self.model, messages=self.chat)
        self.chat.append(answer["choices"][0]["message"])
        return self.chat[-1]["content"]

    async def ask(self, path: str, **asked: Any) -> Any:
        """Send a request to the engine of the run."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        body = json.dumps(asked).encode() if asked else None
        request = urllib.request.Request(self.client_url + path, body, headers)

        def send() -> Any:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)

        return await asyncio.to_thread(send)


class WinRate:
    """A callback that logs the share of games that an evaluation won."""

    def on_evaluation(self, run, step, metrics) -> None:
        """Log the share."""
        run.log({"eval/win_rate": metrics["eval/accuracy/environment"]})
