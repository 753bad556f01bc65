"""Random texts of a policy do not end a run: they go through parsers, environments and the gateway."""

import asyncio
import contextlib
import json
import pickle
import threading

import httpx
import pytest
from kit.gateway_client import Scripted, session_of
from kit.letters import letter_tokenizer
from kit.wild_texts import wild_texts
from websockets.sync.server import serve

from vectorlm.data.encoding import encode
from vectorlm.errors import EngineError, RolloutError
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.report.step_lines import json_text
from vectorlm.rl.agents.gateway import Gateway
from vectorlm.rl.environments.environment import Player, Reply, to_reply
from vectorlm.rl.environments.openenv import OpenEnv
from vectorlm.rl.environments.remote import EnvironmentWorkers, RemoteEnvironment
from vectorlm.rl.environments.tools import parse_calls
from vectorlm.rl.rollouts.replay import record_of
from vectorlm.rl.rollouts.sampler import GroupSampler, Task
from vectorlm.rl.settings import CollectSettings
from vectorlm.types import Completion, PromptRecord

NUM_TEXTS = 300
ASKED = [{"role": "user", "content": "Act."}]
# As in Mistral's template: calls are JSON, and their ids must have nine letters and digits.
TEMPLATE = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]
{%- if m.tool_calls %}{% for c in m.tool_calls %}
{%- if not c.id is defined or c.id | length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}
{{- c.function | tojson }}{% endfor %}{% endif %}
{%- if m.role == 'tool' and (not m.tool_call_id is defined or m.tool_call_id | length != 9) %}
{{- raise_exception("ids have nine letters") }}{% endif %}
{{- m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
SCHEMA = {"type": "function", "function": {"name": "act", "parameters": {"type": "object"}}}
PYTHON = """
class Acts:
    \"\"\"Repeats what it is given; its tool says what the policy asks for, in any form.\"\"\"

    def __init__(self, number=0):
        self.tools = [self.act]

    def act(self, x: int = 0, **others: int):
        \"\"\"Act.

        Args:
            x: What.
            others: What else.
        \"\"\"
        if x == 1:
            exec("exit()")
        return {b"key": x} if x == 2 else b"caf\\xe9".decode("utf-8", "surrogateescape") if x == 3 else x

    def step(self, message):
        import json
        from vectorlm.rl.environments.environment import Reply
        try:
            said = json.loads(message["content"])
        except (ValueError, RecursionError):
            said = message["content"]
        if not isinstance(said, str):
            return [{"role": "user", "content": "No."}]
        return [{"role": "user", "content": said}] if "3" in said else said


class Pages:
    def reset(self, row):
        return [{"role": "user", "content": "z" * 20}]

    def step(self, message):
        return None


class Counts:
    def reset(self, **row):
        self.total = 0

    def act(self, x: int) -> int:
        \"\"\"Add.

        Args:
            x: How much.
        \"\"\"
        self.total += x
        return self.total

    def get_reward(self):
        return 1.0
"""


def environments():
    found = {}
    exec(PYTHON, found)
    return found["Acts"], found["Counts"]


@contextlib.contextmanager
def openenv():
    """Run a server like OpenEnv's own that accepts only the field `message` and echoes it."""

    def session(socket):
        for text in socket:
            asked = json.loads(text)
            data = asked.get("data", {})
            if asked["type"] == "close":
                return
            if asked["type"] == "step" and not isinstance(data.get("message"), str):
                answer = {
                    "type": "error",
                    "data": {"message": f"no message in {data}", "code": "VALIDATION_ERROR"},
                }
            else:
                said = {"message": data.get("message", "")}
                answer = {"type": "observation", "data": {"observation": said, "reward": 1.0, "done": False}}
            socket.send(json.dumps(answer))

    with serve(session, "127.0.0.1", 0, max_size=2**24) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_no_text_is_an_error_of_a_parser_or_an_environment():
    texts = wild_texts(1, NUM_TEXTS)
    tokenizer = letter_tokenizer(template=TEMPLATE)

    async def played(make, columns, texts):
        player = Player(make(), make.__name__)
        await player.reset(ASKED, columns)
        for text in texts:
            message, reply = await player.step(text)
            # A worker pickles the message, a template renders it, and a log stores it.
            pickle.dumps((message, reply))
            json_text(message).encode()
            if not isinstance(reply.messages, str):
                tokenizer.apply_chat_template([*ASKED, message, *reply.messages]) if reply.messages else None
            json.dumps(reply.messages, ensure_ascii=False).encode()
        await player.close()

    for text in texts:
        parse_calls(text, ["act"])
    acts, counts = environments()
    asyncio.run(played(acts, {}, texts))
    asyncio.run(played(counts, {}, texts))
    with openenv() as url:
        asyncio.run(played(OpenEnv, {"openenv_url": url}, texts[: NUM_TEXTS // 4]))


def rollouts_of(make, tmp_path, engine, tokenizer, num_turns, max_model_len):
    """Return the rollouts of two environments that run in workers."""
    (tmp_path / "acts.py").write_text(PYTHON)
    settings = CollectSettings(prompts=("q",), prompts_per_step=1, group_size=2, max_turns=num_turns)

    async def run():
        with WorkerPool(2) as pool:
            host = EnvironmentWorkers(f"{tmp_path}/acts.py:{make}", pool, 20.0)
            sampler = GroupSampler(
                settings=settings,
                seed=0,
                max_model_len=max_model_len,
                tokenizer=tokenizer,
                open_environment=lambda record: RemoteEnvironment(host, record),
            )
            return (await sampler.sample(Task(0, PromptRecord(ASKED)), engine.ask)).rollouts

    return asyncio.run(run())


class Writes(Scripted):
    """An engine that answers with the next text, in a tokenizer's tokens."""

    def __init__(self, texts, tokenizer):
        super().__init__(lambda text, index: next(self._left))
        self._left, self._tokenizer = iter(texts), tokenizer

    async def ask(self, prompt, params, hear=None):
        return await super().ask(encode(prompt, lambda: self._tokenizer), params, hear)

    def completion(self, prompt, text, index):
        said = self.answer(text, index)
        ids = (*self._tokenizer.encode(said.encode(errors="replace").decode(), add_special_tokens=False), 2)
        return Completion(tuple(prompt), ids, (-1.0,) * len(ids), (0,) * len(ids), said, "stop")


@pytest.mark.slow
def test_rollouts_go_on_in_workers_whatever_is_written(tmp_path):
    tokenizer = letter_tokenizer(template=TEMPLATE)
    engine = Writes(wild_texts(2, 60), tokenizer)
    rollouts = rollouts_of("Acts", tmp_path, engine, tokenizer, 30, 10**6)
    assert [rollout.num_turns for rollout in rollouts] == [30] * 2
    for rollout in rollouts:
        json_text(record_of(rollout)).encode()


class Refuses:
    """An engine with a full context."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    async def ask(self, prompt, params, hear=None):
        raise EngineError(f"a prompt has {len(encode(prompt, lambda: self._tokenizer))} tokens")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (TEMPLATE, "48 tokens"),
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
    ],
)
def test_a_first_prompt_that_cannot_be_asked_names_environment_and_prompt(tmp_path, template, why):
    tokenizer = letter_tokenizer(template=template)
    with pytest.raises(RolloutError, match=rf"acts\.py:Pages' .*{why}.*prompt .*Act\."):
        rollouts_of("Pages", tmp_path, Refuses(tokenizer), tokenizer, 3, 46)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_the_gateway_answers_whatever_is_written(path):
    tokenizer = letter_tokenizer(template=TEMPLATE)
    texts = wild_texts(3, 2 * NUM_TEXTS)
    engine = Writes(texts, tokenizer)

    async def run():
        with Gateway(tokenizer, 10**7) as gateway:
            session = session_of(gateway, engine)
            headers = {"Authorization": f"Bearer {session.key}"}
            async with httpx.AsyncClient(
                base_url=gateway.url, headers=headers, timeout=60, verify=False
            ) as client:

                async def ask(**body):
                    answer = await client.post(f"/{path}", json=body)
                    assert answer.status_code == 200, answer.text
                    return answer

                if path == "completions":
                    await ask(prompt="Act.", n=60)
                    for _ in range(5):
                        assert (await ask(prompt="Act.", stream=True)).text.endswith("[DONE]\n\n")
                    return session.rollout(PromptRecord("q"))
                for number in range(2):
                    body = (await ask(messages=ASKED, tools=[SCHEMA], n=60, stream=number == 1)).text
                for _ in range(5):
                    answer = (await ask(messages=ASKED, stream=True)).text
                    assert answer.endswith("[DONE]\n\n")
                # The agent continues from its answer, with the results of its calls.
                asked = list(ASKED)
                for _ in range(NUM_TEXTS // 10):
                    (choice,) = (await ask(messages=asked, tools=[SCHEMA])).json()["choices"]
                    asked.append(choice["message"])
                    for call in choice["message"].get("tool_calls", ()):
                        json.loads(call["function"]["arguments"])
                        asked.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
                    asked.append({"role": "user", "content": "More."})
                assert body
                return session.rollout(PromptRecord("q"))

    rollout = asyncio.run(run())
    json_text(record_of(rollout)).encode()


def test_a_reply_may_repeat_half_a_character():
    reply = to_reply(Reply([{"role": "user", "content": "\ud800"}]))
    assert reply.messages == [{"role": "user", "content": "\\ud800"}]
    assert to_reply("a\udcff").messages == "a\\udcff"
