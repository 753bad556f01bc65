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
    # Of 32 numbers the first guess leaves 23, the next two tell nothing, the fourth leaves 7.
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
