"""Environments of every form, called directly and in workers."""

import asyncio
import functools
import json
import math
import os
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest
import torch

from vectorlm.errors import ConfigError, RolloutError
from vectorlm.ranks.workers.pool import WorkerPool, together
from vectorlm.rl.environments.environment import (
    Player,
    Reply,
    make_environment,
    to_reply,
)
from vectorlm.rl.environments.remote import EnvironmentWorkers, RemoteEnvironment
from vectorlm.runs.preflight.user_code import require_environment
from vectorlm.types import PromptRecord

# Pickling by value spares workers the import of this file and of torch.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ASKED = [{"role": "user", "content": "Guess."}]


class Guess:
    """A game in this library's form."""

    def reset(self, row):
        self.wanted = row["number"]
        return [{"role": "user", "content": "From 1 to 9."}]

    async def step(self, message):
        await asyncio.sleep(0)
        guess = int(message["content"])
        if guess == self.wanted:
            return Reply(reward=1, done=True, metrics={"won": True})
        return {"role": "user", "content": "higher" if guess < self.wanted else "lower"}


class Echo:
    """An environment in the short form, `respond`."""

    def __init__(self, number):
        self.number = number

    def respond(self, text):
        return None if text == "end" else f"{text}{self.number}"


class Counter:
    """An environment in TRL's form."""

    def reset(self, number, **row):
        self.total = number
        return f" Begin at {number}."

    def add(self, by: int) -> int:
        """Add.

        Args:
            by: How much.
        """
        self.total += by
        return self.total

    def get_reward(self):
        return self.total / 10


def player(kind):
    columns = {"number": 3}
    playing = Player(make_environment(kind, columns), kind.__name__)
    return playing, asyncio.run(playing.reset(ASKED, columns))


def test_an_environment_of_this_form():
    game, prompt = player(Guess)
    assert prompt == [*ASKED, {"role": "user", "content": "From 1 to 9."}]
    message, reply = asyncio.run(game.step("1"))
    assert message == {"role": "assistant", "content": "1"}
    assert reply == Reply([{"role": "user", "content": "higher"}])
    assert asyncio.run(game.step("3"))[1] == Reply([], 1.0, True, {"won": 1.0})
    assert asyncio.run(game.close()) is None


def test_respond_is_a_shorthand():
    game, prompt = player(Echo)
    assert prompt == ASKED
    assert asyncio.run(game.step("a"))[1] == Reply("a3")
    assert asyncio.run(game.step("end"))[1].done


def test_an_environment_of_trl():
    game, prompt = player(Counter)
    assert prompt == [{"role": "user", "content": "Guess. Begin at 3."}]
    message, reply = asyncio.run(game.step('<tool_call>{"name": "add", "arguments": {"by": 2}}</tool_call>'))
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"by": 2}}
    assert message["tool_calls"][0]["id"] == "000000000"
    assert reply.messages == [{"role": "tool", "tool_call_id": "000000000", "name": "add", "content": "5"}]
    assert reply.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}
    _, reply = asyncio.run(game.step('<tool_call>{"name": "add", "arguments": {"to": 2}}</tool_call>'))
    assert reply.messages[0]["content"].startswith("error: ")
    _, reply = asyncio.run(game.step("It is 5."))
    assert reply.done
    assert reply.metrics == {"tool_calls": 2.0, "tool_errors": 1.0}
    assert asyncio.run(game.close()) == 0.5


def test_an_environment_of_trl_goes_on_after_an_image():
    playing = Player(Counter(), "Counter")
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Guess."}]
    prompt = asyncio.run(playing.reset([{"role": "user", "content": parts}], {"number": 3}))
    assert prompt == [{"role": "user", "content": [*parts, {"type": "text", "text": " Begin at 3."}]}]


class Files:
    """An environment with a tool that must not be called by accident."""

    def __init__(self):
        self.deleted = []
        self.tools = [self.delete]

    def delete(self, path: str) -> str:
        """Delete a file.

        Args:
            path: Which.
        """
        self.deleted.append(path)
        return "deleted"

    def step(self, message):
        return Reply(reward=1.0, done=True)


DELETE = '<tool_call>{"name": "delete", "arguments": {"path": "a"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "deleted"),
    [
        (f"<think>Never {DELETE}</think>Done.", f"<think>Never {DELETE}</think>Done.", []),
        # The chat template has opened the thought.
        (f"Never {DELETE}</think>Done.", f"Never {DELETE}</think>Done.", []),
        (f"<think>Never {DELETE}", f"<think>Never {DELETE}", []),
        (f"[THINK]{DELETE}[/THINK]No.", f"[THINK]{DELETE}[/THINK]No.", []),
        (f"<think>Is {DELETE} right?</think>Yes.{DELETE}", f"<think>Is {DELETE} right?</think>Yes.", ["a"]),
        (
            '<think>So.</think>\n{"name": "delete", "arguments": {"path": "a"}}',
            "<think>So.</think>",
            ["a"],
        ),
    ],
)
def test_a_call_that_the_policy_only_thinks_of_is_not_made(text, content, deleted):
    files = Files()
    playing = Player(files, "Files")
    asyncio.run(playing.reset(ASKED, {}))
    message, reply = asyncio.run(playing.step(text))
    assert (message["content"], files.deleted) == (content, deleted)
    assert reply.done == (not deleted)


def test_calls_of_a_rollout_have_ids_of_their_own_which_results_repeat():
    playing = Player(Files(), "Files")
    asyncio.run(playing.reset(ASKED, {}))
    ids = []
    for _ in range(2):
        message, reply = asyncio.run(playing.step(DELETE + DELETE))
        ids += [call["id"] for call in message["tool_calls"]]
        assert [result["tool_call_id"] for result in reply.messages] == ids[-2:]
    assert len(set(ids)) == 4
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


SAID = [{"role": "user", "content": "higher"}]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "must return a text, messages, a Reply or None"),
        (b"text", "a bytes, and must return"),
        (["text"], "a list, and must return"),
        ((SAID, 1.0, False), r"belong in Reply\(messages, reward, done\)"),
        ([{"content": "no role"}], "needs a `role` and a `content`"),
        ({"role": "user"}, "needs a `role` and a `content`"),
        ({"role": 3, "content": "a"}, "needs a `role` and a `content`"),
        (Reply(SAID, metrics=None), "the metrics None, which must be a mapping"),
        (Reply(SAID, done="False"), "done='False', which must be True or False"),
        (Reply(SAID, reward=math.nan), "the reward nan, which must be finite"),
        (Reply(SAID, reward="1"), "the reward '1', which must be a number"),
        (Reply(SAID, metrics={"won": None}), "the metric 'won' None, which must be a number"),
        (Reply(SAID, metrics={"won": [1]}), r"the metric 'won' \[1\], which must be a number"),
    ],
)
def test_a_reply_of_which_a_part_has_another_type_is_refused_by_name(value, message):
    with pytest.raises(TypeError, match=message):
        to_reply(value)


def test_numbers_of_other_libraries_are_numbers():
    reply = Reply(SAID, np.float32(0.5), np.bool_(True), {"won": np.int64(1), "share": torch.tensor(0.25)})
    assert to_reply(reply) == Reply(SAID, 0.5, True, {"won": 1.0, "share": 0.25})


def test_messages_may_be_calls_alone_or_parts_as_those_of_prompts():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert to_reply(Reply([call, parts], done=None)) == Reply([call, parts])


def play(kind, turns, timeout_s=20.0):
    """Play in a worker; return the first prompt, the replies, and the final reward."""
    record = PromptRecord(ASKED, {"number": 3})

    async def rollout():
        with WorkerPool(2) as pool:
            playing = RemoteEnvironment(EnvironmentWorkers(kind, pool, timeout_s), record)
            try:
                asked = await playing.reset()
                replies = [await playing.step(text) for text in turns]
            finally:
                reward = await playing.close()
        return asked, replies, reward

    return asyncio.run(rollout())


def test_an_environment_in_a_worker_keeps_its_state_and_tells_its_tools():
    asked, replies, reward = play(Guess, ["5", "3"])
    assert asked[-1]["content"] == "From 1 to 9."
    assert [reply.done for _, reply in replies] == [False, True]
    # The limit applies to the environment's own work, not to the import of torch, which describes its tools.
    asked, replies, reward = play(Counter, ['{"name": "add", "arguments": {"by": 4}}', "7"], timeout_s=2.0)
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["add"]
    assert replies[0][1].messages[0]["content"] == "7"
    assert reward == 0.7


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: A number.
        b: A number.
    """
    return a + b


def take(a: int, b: int) -> int:
    """Subtract.

    Args:
        a: A number.
        b: A number.
    """
    return a - b


class Chooses:
    """An environment whose row decides its tools."""

    def __init__(self, number):
        self.tools = {3: [add], 4: [take]}.get(number, [])

    def step(self, message):
        return None


class ChoosesLate:
    """An environment that sets its tools in `reset`, and calls its own `respond`."""

    def reset(self, row):
        Chooses.__init__(self, row["number"])

    def step(self, message):
        return self.respond(message["content"])

    def respond(self, text):
        return None


class ChoosesInOneProcess:
    async def reset(self, row):
        Chooses.__init__(self, row["number"])

    async def step(self, message):
        return None


@pytest.mark.parametrize(
    "kind",
    [Chooses, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (ChoosesLate, ChoosesInOneProcess))],
)
def test_the_policy_is_told_of_the_tools_that_the_environment_of_its_rollout_has(kind):
    async def rollout(host, number):
        playing = RemoteEnvironment(host, PromptRecord(ASKED, {"number": number}))
        asked = await playing.reset()
        told = [tool["function"]["name"] for tool in asked["tools"]] if isinstance(asked, dict) else []
        calls = [{"name": name, "arguments": {"a": 3, "b": 1}} for name in ("add", "take")]
        replies = [(await playing.step(json.dumps(call)))[1] for call in calls]
        await playing.close()
        # Without tools, a call is a normal message.
        return told, [reply.messages[0]["content"] for reply in replies if reply.messages]

    async def rollouts():
        with WorkerPool(2) as pool:
            host = EnvironmentWorkers(kind, pool, 20.0)
            first = await rollout(host, 5)
            return [first, *await asyncio.gather(*(rollout(host, number) for number in (3, 4, 3)))]

    added = (["add"], ["4", "error: there is no tool 'take', only add"])
    taken = (["take"], ["error: there is no tool 'add', only take", "2"])
    assert asyncio.run(rollouts()) == [([], []), added, taken, added]


@pytest.mark.slow
def test_a_tool_that_hangs_is_not_called_a_fault_of_step_alone():
    class Hangs:
        tools = (functools.wraps(add)(lambda a, b: time.sleep(60)),)

        def step(self, message):
            return None

    why = "failed in step or a tool: no answer within 1 s.*output of this process.*rl.environment_timeout_s"
    with pytest.raises(RolloutError, match=why):
        play(Hangs, ['{"name": "add", "arguments": {"a": 1, "b": 2}}'], timeout_s=1.0)


@pytest.mark.parametrize("prompt", ["Guess.", [5, 6]])
def test_tools_beside_a_prompt_without_a_template_are_refused_before_the_first_turn(prompt):
    async def rollout():
        with WorkerPool(1) as pool:
            playing = RemoteEnvironment(
                EnvironmentWorkers(Chooses, pool, 20.0), PromptRecord(prompt, {"number": 3})
            )
            try:
                await playing.reset()
            finally:
                await playing.close()

    with pytest.raises(RolloutError, match="'Chooses' has tools"):
        asyncio.run(rollout())


def faulty(fault, method, is_async):
    """Return an environment class whose `method` is faulty."""

    def fail(self, *arguments):
        return fault()

    def fine(self, *arguments):
        return [{"role": "user", "content": "go on"}]

    async def fail_later(self, *arguments):
        return fault()

    async def fine_later(self, *arguments):
        return [{"role": "user", "content": "go on"}]

    methods = dict.fromkeys(("reset", "step", "close"), fine_later if is_async else fine)
    return type("Faulty", (), methods | {method: fail_later if is_async else fail})


class Slow:
    """An asynchronous environment, which runs in one process with its kind; a message is the seconds of a turn."""

    closed = 0

    async def step(self, message):
        await asyncio.sleep(float(message["content"]))
        return Reply("more", metrics={"pid": os.getpid(), "closed": Slow.closed})

    async def close(self):
        Slow.closed += 1


def test_asynchronous_environments_are_waited_for_in_one_process():
    async def rollout(host):
        playing = RemoteEnvironment(host, PromptRecord(ASKED))
        await playing.reset()
        for _ in range(4):
            _, reply = await playing.step("0.2")
        await playing.close()
        return reply.metrics["pid"]

    async def rollouts():
        with WorkerPool(1) as pool:
            host = EnvironmentWorkers(Slow, pool, 20.0)
            return await asyncio.gather(*(rollout(host) for _ in range(64)))

    # One after another, the turns would take 51 s.
    assert len(set(asyncio.run(asyncio.wait_for(rollouts(), 25)))) == 1


def test_a_synchronous_tool_does_not_block_the_environments_of_its_process():
    meeting = threading.Barrier(2, timeout=10)

    def meet() -> str:
        """Meet."""
        meeting.wait()
        return "met"

    class Late:
        async def reset(self, row):
            self.tools = [meet]

        async def step(self, message):
            return None

    async def rollout():
        playing = Player(Late(), "Late")
        await playing.reset(ASKED, {})
        _, reply = await playing.step('{"name": "meet", "arguments": {}}')
        return reply.messages[0]["content"]

    async def rollouts():
        return await asyncio.gather(rollout(), rollout())

    assert asyncio.run(rollouts()) == ["met", "met"]


@pytest.mark.parametrize("is_async", [True, False])
def test_every_instance_is_closed(tmp_path, is_async):
    class Holds:
        def __init__(self):
            with (tmp_path / "made").open("a") as made:
                made.write("x")

        def step(self, message):
            return None

        def close(self):
            with (tmp_path / "closed").open("a") as closed:
                closed.write("x")

    class HoldsLater(Holds):
        async def step(self, message):
            return None

        async def close(self):
            super().close()

    play(HoldsLater if is_async else Holds, ["0"])
    made, closed = ((tmp_path / name).read_text() for name in ("made", "closed"))
    assert made == closed == ("xx" if is_async else "x")


def test_an_asynchronous_call_that_is_cancelled_is_closed_and_leaves_the_others():
    async def rollouts():
        with WorkerPool(1) as pool:
            host, record = EnvironmentWorkers(Slow, pool, 60.0), PromptRecord(ASKED)
            first, second = RemoteEnvironment(host, record), RemoteEnvironment(host, record)
            await asyncio.gather(first.reset(), second.reset())
            going_on = asyncio.create_task(second.step("1"))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(first.step("30"), 0.3)
            await first.close()
            await going_on
            _, reply = await second.step("0")
            await second.close()
            return reply.metrics["closed"]

    # The first instance only showed that its tools are asynchronous.
    assert asyncio.run(asyncio.wait_for(rollouts(), 25)) in (1, 2)


def test_the_asynchronous_environment_that_is_late_is_the_one_that_is_named():
    async def rollouts():
        with WorkerPool(1) as pool:
            host = EnvironmentWorkers(Slow, pool, 1.0)
            games = [RemoteEnvironment(host, PromptRecord(f"q{index}")) for index in range(3)]
            await asyncio.gather(*(game.reset() for game in games))
            await together(game.step(text) for game, text in zip(games, ("0.9", "30", "0.9"), strict=True))

    with pytest.raises(RolloutError, match=r"no answer within 1 s \(prompt 'q1'"):
        asyncio.run(rollouts())


def test_an_environment_may_run_a_loop_of_its_own():
    class Own:
        def step(self, message):
            return asyncio.run(asyncio.sleep(0, "fine"))

    assert play(Own, ["a"])[1][0][1] == Reply("fine")


def test_a_call_that_is_cancelled_ends_its_worker():
    class Slow:
        def step(self, message):
            time.sleep(0 if message["content"] == "fast" else 60)

    async def rollouts():
        with WorkerPool(1) as pool:
            host, record = EnvironmentWorkers(Slow, pool, None), PromptRecord(ASKED)
            first = RemoteEnvironment(host, record)
            await first.reset()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(first.step("slow"), 0.5)
            await first.close()
            second = RemoteEnvironment(host, record)
            await second.reset()
            _, reply = await second.step("fast")
            await second.close()
            return reply.done

    assert asyncio.run(asyncio.wait_for(rollouts(), 40))


def leave():
    os._exit(3)


def refuse():
    raise ConnectionRefusedError("port 80")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "is_async"), [("reset", False), ("step", False), ("close", False), ("step", True)]
)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda: 1 / 0, rf"ZeroDivisionError: division by zero \({__file__}:\d+\)"),
        (lambda: time.sleep(60), r"no answer within 1 s"),
        (refuse, rf"ConnectionRefusedError: port 80 \({__file__}:\d+\)"),
        (lambda: sys.exit(2), rf"SystemExit: 2 \({__file__}:\d+\)"),
        (leave, "its process ended with exit code 3"),
        (lambda: 3, "TypeError: it returned '?3'?, a int"),
    ],
)
def test_an_environment_that_fails_is_named_with_prompt_turn_and_text(method, fault, message, is_async):
    if method == "close" and "TypeError" in message:
        pytest.skip("what close returns is not read")
    turn = 0 if method == "reset" else 1
    where = rf"(its constructor or )?{method}( or a tool)?"
    why = rf"(?s)'Faulty' failed in {where}: {message}.*Guess.*turn {turn}, after"
    with pytest.raises(RolloutError, match=why):
        play(faulty(fault, method, is_async), ["5"], timeout_s=1.0)


OWN_TYPES = """
import enum
from vectorlm.errors import VectorLMError

class Hint(str, enum.Enum):
    LOWER = "Lower."

class Odd:
    def __reduce__(self):
        return divmod, (1, 0)

class Own(VectorLMError):
    pass

class Game:
    WORD step(self, message):
        if message["content"] == "raise":
            raise Own("no")
        content = "".join(Hint.LOWER) if message["content"] == "plain" else Hint.LOWER
        more = {"odd": Odd()} if message["content"] == "odd" else {}
        return [{"role": "user", "content": "" if more else content, **more}]
"""


@pytest.mark.parametrize("word", ["def", "async def"])
def test_a_reply_of_a_type_that_the_rank_cannot_import_is_named(tmp_path, word):
    path = tmp_path / "game.py"
    path.write_text(OWN_TYPES.replace("WORD", word))
    for text, message in (("hint", "'Hint'"), ("raise", "'Own'"), ("odd", "ZeroDivisionError")):
        with pytest.raises(RolloutError, match=rf"failed in step: .*{message}"):
            play(f"{path}:Game", ["plain", text], timeout_s=5.0)


def test_a_worker_of_many_jobs_reads_on_after_an_answer_of_an_unknown_type(tmp_path):
    path = tmp_path / "game.py"
    path.write_text(OWN_TYPES.replace("WORD", "async def"))

    async def rollouts():
        with WorkerPool(1) as pool:
            host = EnvironmentWorkers(f"{path}:Game", pool, 5.0)
            games = [RemoteEnvironment(host, PromptRecord(ASKED)) for _ in range(2)]
            await asyncio.gather(*(game.reset() for game in games))
            with pytest.raises(RolloutError, match="'Hint'"):
                await games[0].step("hint")
            await games[0].close()
            _, reply = await games[1].step("plain")
            await games[1].close()
            return reply.messages[0]["content"]

    assert asyncio.run(asyncio.wait_for(rollouts(), 40)) == "Lower."


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda: 1 / 0, rf"ZeroDivisionError: division by zero \({__file__}:\d+\)"),
        (lambda: time.sleep(5), r"no answer within 1 s"),
        (leave, "its process ended with exit code 3"),
    ],
)
def test_an_environment_that_cannot_be_made_is_named_with_the_prompt(fault, message):
    made = type("Unmade", (Guess,), {"__init__": lambda self: fault()})
    with pytest.raises(
        RolloutError,
        match=rf"(?s)'Unmade' failed in its (import or constructor|constructor or reset): {message}.*Guess.*turn 0",
    ):
        play(made, [], timeout_s=1.0)


class Untyped:
    """An environment whose tool has no types."""

    def reset(self, **row):
        pass

    def add(self, by):
        """Add."""


class Misspelt:
    """An environment with `reset(row)`, whose other methods are not tools."""

    def reset(self, row):
        pass

    def stepp(self, message: dict) -> Reply:
        """Answer.

        Args:
            message: What the policy said.
        """


def supplied(method):
    """Return the method with an argument that its caller does not pass."""

    @functools.wraps(method)
    def called(self, message):
        return method(self, message, "a database")

    return called


class HasMore:
    """An environment with uncalled methods that have the names of other forms' methods."""

    def reset(self, row):
        pass

    @supplied
    def step(self, message, database):
        pass

    def respond(self, text, history):
        pass

    def get_reward(self, answer):
        pass


class Responds:
    def respond(self, text):
        pass

    def reset(self):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (3, "env.py:X. must be a class or a function"),
        (type("Silent", (), {}), "the environment 'env.py:X' has no method `step`"),
        (Misspelt, r"no method `step`. Did you mean 'stepp'\?"),
        (Untyped, r"the tool 'add' .* missing a type hint .*test_environment.py:\d+"),
        (
            type("Named", (Guess,), {"tools": {"add": add}}),
            "the tool 'add', a str: a tool must be a function",
        ),
        (type("Steps", (), {"step": lambda self: None}), r"X.step' cannot be called with \(self, message\)"),
        (type("Many", (), {"step": lambda self, message, info: None}), "missing a required argument: 'info'"),
        (
            type("Resets", (Guess,), {"reset": lambda self: None}),
            r"X.reset' cannot be called with \(self, row\)",
        ),
        (type("Closes", (Guess,), {"close": lambda self, how: None}), "missing a required argument: 'how'"),
        (
            lambda number, wanted: None,
            "needs the parameter 'wanted', and .* number",
        ),
        (type("Made", (Guess,), {"__init__": lambda self, numbr: None}), "Did you mean 'number'"),
    ],
)
def test_what_is_no_environment_is_refused_before_anything_starts(make, message):
    with pytest.raises(ConfigError, match=message):
        require_environment(make, "env.py:X", {"number"})
    for fine in (Guess, Echo, Counter, HasMore, Responds, lambda number, other=3, **rest: Guess()):
        require_environment(fine, "env.py:X", {"number"})


def test_an_agent_is_called_with_three_arguments():
    require_environment(lambda url, key, row: None, "openai:agents.py:play", set())
    with pytest.raises(ConfigError, match=r"cannot be called with \(url, key, row\)"):
        require_environment(lambda url, row: None, "openai:agents.py:play", set())
