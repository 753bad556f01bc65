"""The environments of the examples, without a policy."""

import asyncio
import json
import math

import pytest
from kit.pages import ROOT

from vectorlm.plugin import load_plugin
from vectorlm.rl.environments.tools import schemas_of


def example(name):
    return load_plugin(f"{ROOT}/examples/{name}")


@pytest.mark.parametrize("name", ["Game", "RewardedLast"])
def test_a_guess_earns_what_it_tells(name):
    game = example(f"guessing_game.py:{name}")(number=20)
    replies = [asyncio.run(game.step({"content": text})) for text in ("18", "50", "x", "26", "20")]
    # Of 32 numbers the first guess leaves 23. The next two exclude none, and the fourth leaves 7.
    points = [math.log2(32 / 23) / 5, 0.0, 0.0, math.log2(23 / 7) / 5, math.log2(7) / 5]
    if name == "RewardedLast":
        points = [None] * 4 + [pytest.approx(1.0)]
    assert [reply.reward for reply in replies] == points
    assert [reply.messages[0]["content"] for reply in replies[:4]] == ["19 to 41?"] * 3 + ["19 to 25?"]
    assert [reply.done for reply in replies] == [False] * 4 + [True]
    assert replies[-1].metrics == {"won": True, "guesses": 5}
    assert example("guessing_game.py:won")("", replies[-1].metrics) == 1.0


def test_a_game_ends_after_five_guesses():
    game = example("guessing_game.py:Game")(number=20)
    assert [asyncio.run(game.step({"content": "21"})).done for _ in range(5)] == [False] * 4 + [True]


def test_the_calculator_has_a_tool_and_the_answer_is_in_the_last_message():
    calculator = example("calculator_chat.py:Calculator")()
    assert calculator.step({"content": "60"}) is None
    (schema,) = schemas_of(calculator.tools, "calculator")
    assert json.dumps(schema["function"]["parameters"]["required"]) == '["a", "b"]'
    is_right = example("calculator_chat.py:is_right")
    messages = [{"role": "tool", "content": "60"}, {"role": "assistant", "content": "42"}]
    assert [is_right("", messages, answer) for answer in (42, 60)] == [1.0, 0.0]


def nim(sticks, answers=(), **more):
    """Return a game whose opponent gives `answers` in place of an engine, and the list of its requests."""
    game, asked = example("nim.py:Nim")(sticks, more.pop("opponent", "self"), game=1, **more), []
    answers = iter(answers)

    async def ask(path, **request):
        asked.append((path, json.loads(json.dumps(request))))
        if path == "/models":
            return {"data": [{"id": name} for name in ("policy", "base", "policy@10")]}
        return {"choices": [{"message": {"role": "assistant", "content": next(answers)}}]}

    game.ask = ask
    return game, asked


@pytest.mark.parametrize(
    ("moves", "answers", "has_won"),
    [
        (("4", "0"), ("2",), True),
        (("4", "1"), ("2", "0"), False),
        (("3",), (), False),
        (("6",), ("7",), True),
    ],
)
def test_who_takes_the_last_stick_wins_and_an_illegal_move_loses(moves, answers, has_won):
    game, asked = nim(7, answers)
    replies = [asyncio.run(game.step({"content": move})) for move in moves]
    assert [reply.done for reply in replies] == [False] * (len(moves) - 1) + [True]
    assert replies[-1].reward == replies[-1].metrics["acc"] == has_won
    assert all(request["model"] == "policy@10" for path, request in asked if path != "/models")
    # The opponent sees the game from its own side.
    roles = [
        [message["role"] for message in request["messages"]] for path, request in asked if path != "/models"
    ]
    assert roles == [["user"], ["user", "assistant", "user"]][: len(roles)]


def test_the_fixed_opponent_never_misses_a_win():
    games = [nim(5, opponent="fixed")[0] for _ in range(3)]
    replies = [asyncio.run(game.step({"content": left})) for left, game in zip("323", games, strict=True)]
    assert [(reply.done, reply.reward) for reply in replies] == [(True, 0.0)] * 3
