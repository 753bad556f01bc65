"""The gateway: agents' HTTP requests become rollouts, token by token, and broken clients do no harm."""

import asyncio
import json
import os
import re
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from kit.gateway_client import Scripted, session_of
from kit.letters import Letters

from vectorlm.errors import EngineError, RolloutError
from vectorlm.rl.agents import gateway as gateways
from vectorlm.rl.agents.gateway import Gateway
from vectorlm.rl.agents.session import RequestError
from vectorlm.types import PromptRecord

USER = [{"role": "user", "content": "Hi"}]
RECORD = PromptRecord("Hi")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def http(gateway, session):
    headers = {"Authorization": f"Bearer {session.key}"}
    return httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=30, verify=False)


def with_session(work, engine=None, **more):
    """Return what ``await work(gateway, session, client)`` returns."""
    engine = engine or Scripted(lambda text, index: " yes ")

    async def run():
        with Gateway(Letters(), 4000) as gateway:
            session = session_of(gateway, engine, **more)
            async with http(gateway, session) as client:
                return await work(gateway, session, client)

    return asyncio.run(run())


async def chat(client, messages, **more):
    answer = await client.post("/chat/completions", json={"model": "policy", "messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_of_the_machine_cannot_reach_it_without_the_key():
    script = (
        # Import the modules first: the other user may not be able to read Python's folder.
        "import encodings.idna, os, sys, urllib.request, urllib.error\n"
        "os.setgid(65534), os.setuid(65534)\n"
        "url, pid = sys.argv[1:]\n"
        "for key in ('', 'Bearer ', 'Bearer x'):\n"
        "    request = urllib.request.Request(url + '/models', headers={'Authorization': key})\n"
        "    try: urllib.request.urlopen(request); print('open')\n"
        "    except urllib.error.HTTPError as error: print(error.code)\n"
        "for name in ('environ', 'mem', 'fd'):\n"
        "    try: (os.listdir if name == 'fd' else open)(f'/proc/{pid}/{name}'); print('read')\n"
        "    except PermissionError: print('closed')\n"
        "print(open(f'/proc/{pid}/cmdline').read())\n"
    )

    async def work(gateway, session, client):
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", script, gateway.url, str(os.getpid())), stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await run.communicate()
        return session.key, printed.decode()

    key, printed = with_session(work)
    assert printed.split()[:6] == ["401"] * 3 + ["closed"] * 3
    assert key not in printed


def text_of(ids):
    return "".join(map(chr, ids))


def test_a_chat_is_a_rollout_with_the_tokens_that_were_sampled():
    async def work(gateway, session, client):
        first = await chat(client, USER)
        said = first["choices"][0]["message"]
        assert said == {"role": "assistant", "content": " yes "}
        assert first["usage"] == {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
        # A framework strips the policy's text and adds fields; the tokens stay.
        said = {"role": "assistant", "content": "yes", "refusal": None, "annotations": []}
        await chat(client, [*USER, said, {"role": "user", "content": [{"type": "text", "text": "So?"}]}])
        return session.rollout(RECORD)

    found = with_session(work)
    assert text_of(found.prompt_token_ids) == "<u>Hi\n<a>"
    assert text_of(found.token_ids) == found.text == " yes \n<u>So?\n<a> yes "
    assert (
        text_of(t for t, chosen in zip(found.token_ids, found.policy_mask, strict=True) if chosen)
        == " yes  yes "
    )
    assert found.versions == (3,) * 5 + (-1,) * 11 + (3,) * 5
    assert found.sampler_logprobs[:5] == (-1.0, -1.125, -1.25, -1.375, -1.5)
    assert (found.num_turns, found.turn_ends, found.finish_reason) == (2, (5, 21), "stop")
    assert found.branches == ()


def test_what_is_rewritten_becomes_a_row_of_its_own_and_each_token_is_trained_on_once():
    async def work(gateway, session, client):
        await chat(client, USER)
        said = {"role": "assistant", "content": " yes "}
        for question in ("A", "B"):
            await chat(client, [*USER, said, {"role": "user", "content": question}])
        await chat(client, [{"role": "user", "content": "In short?"}])
        return session.rollout(RECORD)

    found = with_session(work)
    rows = [found, *found.branches]
    assert [text_of(row.prompt_token_ids + row.token_ids) for row in rows] == [
        "<u>In short?\n<a> yes ",
        "<u>Hi\n<a> yes \n<u>B\n<a> yes ",
        "<u>Hi\n<a> yes \n<u>A\n<a> yes ",
    ]
    assert [row.num_policy_tokens for row in rows] == [20, 10, 5], (
        "a rollout counts the tokens of all its rows"
    )
    assert rows[2].policy_mask[:5] == (False,) * 5


def test_texts_and_token_ids_go_on_from_what_was_sampled():
    async def work(gateway, session, client):
        answer = await client.post("/completions", json={"prompt": "2+2=", "logprobs": 0})
        choice = answer.json()["choices"][0]
        assert choice["text"] == " yes "
        assert choice["logprobs"]["token_logprobs"] == [-1.0, -1.125, -1.25, -1.375, -1.5]
        await client.post("/completions", json={"prompt": "2+2= yes  sure?"})
        ids = list(map(ord, "2+2= yes  sure? yes !"))
        url = gateway.url.removesuffix("/v1") + "/inference/v1/generate"
        asked = {
            "token_ids": ids,
            "sampling_params": {"logprobs": 1, "stop_token_ids": [7], "skip_special_tokens": False},
        }
        answer = await client.post(url, json={"model": "policy", "cache_salt": "0", **asked})
        choice = answer.json()["choices"][0]
        assert text_of(choice["token_ids"]) == " yes "
        assert choice["logprobs"]["content"][1]["token"] == f"token_id:{ord('y')}"
        assert choice["versions"] == [3] * 5
        return session.rollout(RECORD)

    found = with_session(work)
    assert text_of(found.token_ids) == " yes  sure? yes ! yes "
    assert found.num_turns == 3


def test_tools_are_called_in_openai_s_form_and_answered_in_the_policy_s():
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    engine = Scripted(lambda text, index: "Cold." if "<t>" in text else call)

    async def work(gateway, session, client):
        choice = (await chat(client, USER, tools=[WEATHER]))["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (made,) = choice["message"]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"city": "Oslo"}
        told = {"role": "tool", "tool_call_id": made["id"], "content": "-3"}
        answer = await chat(client, [*USER, choice["message"], told], tools=[WEATHER])
        assert answer["choices"][0]["message"]["content"] == "Cold."
        return session.rollout(RECORD)

    assert with_session(work, engine).text == f"{call}\n<t>-3\n<a>Cold."


def test_an_answer_is_streamed_as_events_and_several_have_their_index():
    async def work(gateway, session, client):
        asked = {"messages": USER, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
        answer = await client.post("/chat/completions", json=asked)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *lines, last = answer.text.strip().split("\n\n")
        assert last == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        texts = ["", ""]
        for event in events[:-1]:
            assert event["object"] == "chat.completion.chunk"
            texts[event["choices"][0]["index"]] += event["choices"][0]["delta"].get("content", "")
        assert events[-1]["usage"]["completion_tokens"] == 4
        return texts, session.rollout(RECORD)

    texts, found = with_session(work, Scripted(lambda text, index: f"a{index}"))
    assert texts == ["a0", "a1"]
    assert [row.text for row in [found, *found.branches]] == ["a1", "a0"]


FORMS = [
    ("chat/completions", {"messages": USER, "logprobs": True}),
    ("completions", {"prompt": "Hi", "logprobs": 0}),
]


def event_of(line):
    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
    return choice.get("text", choice.get("delta", {}).get("content", "")), choice


@pytest.mark.parametrize(("path", "asked"), FORMS)
def test_an_answer_is_sent_as_it_is_sampled_and_is_the_same_as_without(path, asked):
    asked = {**asked, "return_token_ids": True, "max_tokens": 9}

    async def work(gateway, session, client):
        read = [asyncio.Event() for _ in "yes!"]
        # The engine samples the next token only after the client has read the last one.
        engine = Scripted(
            lambda text, index: "yes!",
            may_go_on=lambda place: asyncio.wait_for(
                read[place - 1].wait() if place else asyncio.sleep(0), 20
            ),
        )
        streaming = session_of(gateway, engine, seed_of=lambda number: number)
        texts, ids, versions = [], [], []
        async with (
            http(gateway, streaming) as other,
            other.stream("POST", f"/{path}", json={**asked, "stream": True}) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text, choice = event_of(line)
                    texts.append(text)
                    ids += choice.get("token_ids", [])
                    versions += choice.get("versions", [])
                    if len(texts) <= len(read):
                        read[len(texts) - 1].set()
        whole = session_of(gateway, Scripted(lambda text, index: "yes!"), seed_of=lambda number: number)
        async with http(gateway, whole) as other:
            await other.post(f"/{path}", json=asked)
        return texts, ids, versions, streaming.rollout(RECORD), whole.rollout(RECORD)

    texts, ids, versions, streamed, whole = with_session(work)
    assert texts == ["y", "e", "s", "!", "", ""]
    assert (text_of(ids), versions) == ("yes!", [3] * 4)
    assert streamed == whole


def test_a_client_that_leaves_a_stream_takes_its_request_back():
    async def work(gateway, session, client):
        async with client.stream(
            "POST", "/chat/completions", json={"messages": USER, "stream": True}
        ) as answer:
            async for line in answer.aiter_lines():
                if line:
                    break
        async with asyncio.timeout(20):
            while not engine.given_up:
                await asyncio.sleep(0.01)
        with pytest.raises(RolloutError, match="without an answer"):
            session.rollout(RECORD)

    engine = Scripted(lambda text, index: "yes", may_go_on=lambda place: asyncio.sleep(60 if place else 0))
    with_session(work, engine)


def test_what_fails_in_a_stream_is_told_in_it_and_before_it_by_the_status():
    async def fail(place):
        if place == first:
            raise EngineError("no room")

    async def work(gateway, session, client):
        answer = await client.post("/chat/completions", json={"messages": USER, "stream": True})
        return answer.status_code, answer.text

    first = 0
    status, text = with_session(work, Scripted(lambda text, index: "yes", may_go_on=fail))
    assert (status, json.loads(text)["error"]["message"]) == (400, "no room")
    first = 2
    status, text = with_session(work, Scripted(lambda text, index: "yes", may_go_on=fail))
    *_, last = text.strip().split("\n\n")
    assert (status, json.loads(last.removeprefix("data: "))["error"]["message"]) == (200, "no room")


def test_the_client_of_openai_goes_on_from_its_own_objects():
    openai = pytest.importorskip("openai")

    async def work(gateway, session, client):
        agent = openai.AsyncOpenAI(base_url=gateway.url, api_key=session.key)
        assert [model.id async for model in await agent.models.list()] == ["policy"]
        first = await agent.chat.completions.create(
            model="policy", messages=USER, max_tokens=5, logprobs=True
        )
        messages = [*USER, first.choices[0].message, {"role": "user", "content": "So?"}]
        stream = await agent.chat.completions.create(model="policy", messages=messages, stream=True)
        text = "".join([event.choices[0].delta.content or "" async for event in stream])
        with pytest.raises(openai.AuthenticationError):
            await openai.AsyncOpenAI(base_url=gateway.url, api_key="wrong").models.list()
        await agent.close()
        return text, session.rollout(RECORD)

    text, found = with_session(work)
    assert text == " yes "
    assert found.num_turns == 2
    assert found.branches == ()


@pytest.mark.parametrize(
    ("path", "asked", "status", "param"),
    [
        ("chat/completions", {"messages": USER, "temperature": 0.3}, 400, "temperature"),
        ("chat/completions", {"messages": USER, "top_p": 0.9}, 400, "top_p"),
        ("chat/completions", {"messages": USER, "logit_bias": {"1": 5}}, 400, "logit_bias"),
        ("chat/completions", {"messages": USER, "presence_penalty": 1}, 400, "presence_penalty"),
        ("chat/completions", {"messages": USER, "max_tokens": "many"}, 400, "max_tokens"),
        ("chat/completions", {"messages": USER, "n": 100}, 400, "n"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages[0].role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "messages[0]",
        ),
        ("chat/completions", {"messages": USER, "model": "gpt"}, 404, "model"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, None),
        ("completions", {"prompt": "x", "best_of": 3}, 400, "best_of"),
        ("completions", {}, 400, "prompt"),
        ("responses", {"input": "x"}, 404, "path"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_with_its_field(path, asked, status, param):
    async def work(gateway, session, client):
        answer = await client.post(f"/{path}", json=asked)
        with pytest.raises(RolloutError, match="without an answer"):
            session.rollout(RECORD)
        return answer

    answer = with_session(work)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


NOTHING = {
    "response_format": [None, {"type": "text"}],
    "seed": [None],
    "logit_bias": [None, {}],
    "repetition_penalty": [1, 1.0],
    "presence_penalty": [0],
    "min_tokens": [0],
    "modalities": [["text"]],
    "functions": [None, []],
    "prediction": [None],
    "tool_choice": [None, "auto", "none"],
    "top_logprobs": [0],
    "stream_options": [{"include_usage": None}],
    "temperature": [1, None],
}


def test_a_field_that_asks_for_nothing_is_taken():
    async def work(gateway, session, client):
        for name, values in NOTHING.items():
            for value in values:
                await chat(client, USER, **{name: value})
        for asked in (
            {"prompt": ["Hi"]},
            {"prompt": [[72, 105]]},
            {"prompt": "Hi", "best_of": 1, "suffix": ""},
        ):
            assert (await client.post("/completions", json=asked)).json()["usage"]["prompt_tokens"] == 2
        several = await client.post("/completions", json={"prompt": ["Hi", "Ho"]})
        assert several.status_code == 400
        assert "one prompt" in several.json()["error"]["message"]

    with_session(work)


@pytest.mark.parametrize(
    "asked",
    [
        {"seed": 0},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"1": 5}},
        {"repetition_penalty": 1.1},
        {"min_tokens": 3},
        {"tool_choice": "required"},
        {"anything": "else"},
    ],
)
def test_a_field_that_is_not_taken_is_explained(asked):
    async def work(gateway, session, client):
        answer = await client.post("/chat/completions", json={"messages": USER, **asked})
        (name,) = asked
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{name}=")
        assert session.refusal == message
        await chat(client, USER)
        assert session.refusal == ""

    with_session(work)


class WithoutTemplate(Letters):
    """A base model's tokenizer without a chat template."""

    def apply_chat_template(self, messages, **how):
        raise ValueError("tokenizer.chat_template is not set")

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("path", "asked", "why"),
    [
        ("chat/completions", {"messages": USER}, "chat_template is not set"),
        ("completions", {"prompt": [72, 97, 2**30]}, "ValueError: chr"),
        ("completions", {"prompt": [72, 2**70]}, "less than 2147483648"),
        ("completions", {"prompt": [-1]}, "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_rendered_or_decoded_is_refused_with_the_reason(path, asked, why):
    async def run():
        with Gateway(WithoutTemplate(), 4000) as gateway:
            session = session_of(gateway, Scripted(lambda text, index: "a"), tokenizer=WithoutTemplate())
            async with http(gateway, session) as client:
                await client.post("/completions", json={"prompt": [72]})
                return await client.post(f"/{path}", json=asked)

    answer = asyncio.run(run())
    assert answer.status_code == 400
    assert re.search(why, answer.json()["error"]["message"])


def test_in_an_evaluation_the_parameters_are_the_run_s_whatever_the_agent_asks_for():
    engine = Scripted(lambda text, index: "a")

    async def work(gateway, session, client):
        await chat(client, USER, temperature=1.0, top_p=0.5, max_tokens=3)

    with_session(work, engine, sampling={"temperature": 0.0, "max_tokens": 50}, is_trained_on=False)
    assert engine.params == [{"logprobs": 0, "temperature": 0.0, "max_tokens": 3, "n": 1}]


@pytest.mark.parametrize("is_environment", [False, True])
def test_only_policies_follow_the_run_s_grammar_and_stops(is_environment):
    engine = Scripted(lambda text, index: "a")
    drawn = {"temperature": 0.5, "max_tokens": 50}
    sampling = {
        **drawn,
        "structured_outputs": {"regex": "a+"},
        "stop": ["\n"],
        "stop_token_ids": [3],
        "min_tokens": 1,
    }
    models = ["base", "reference", "policy@8"]

    async def work(gateway, session, client):
        gateway._engine = SimpleNamespace(adapters=models)
        gateway._ask = lambda name, *asked: engine.ask(*asked)
        with gateway.access(lambda number: 7, sampling=sampling) as access:
            if is_environment:
                client.headers["Authorization"] = f"Bearer {access['key']}"
            for model in models:
                await chat(client, USER, model=model)

    with_session(work, engine, sampling=sampling, seed_of=lambda number: 7)
    fixed = {"logprobs": 0, "n": 1, "seed": 7}
    assert engine.params == [{**given, **fixed} for given in (drawn, drawn, sampling)]


def test_the_seed_and_the_parameters_are_the_run_s():
    engine = Scripted(lambda text, index: "a")

    async def work(gateway, session, client):
        await chat(client, USER, max_completion_tokens=7, temperature=0.5, stop=["\n"])
        await chat(client, USER, max_tokens=70, n=2)

    with_session(
        work,
        engine,
        sampling={"temperature": 0.5, "max_tokens": 50, "logprobs": None},
        seed_of=lambda number: 10 + number,
    )
    assert engine.params == [
        {"logprobs": 0, "temperature": 0.5, "max_tokens": 7, "stop": ["\n"], "n": 1, "seed": 10},
        {"logprobs": 0, "temperature": 0.5, "max_tokens": 50, "n": 2, "seed": 11},
    ]


class Ends(Scripted):
    """An engine whose texts end before the stop string and the end token, which are among its tokens."""

    def completion(self, prompt, text, index):
        whole = super().completion(prompt, text, index)
        return replace(whole, text=whole.text.rstrip("\0").partition("\nObservation:")[0])


@pytest.mark.parametrize(
    ("prompts", "answers", "seen"),
    [
        (["2+2="] * 3, ["\0", "4\0", "5\0"], ["2+2="] * 3),
        (["2+2=", "2+2= please"], ["\0", "4"], ["2+2=", "2+2= please"]),
        (["Q", "Qab", "Qab"], ["ab", "\0", "c"], ["Q", "Qab", "Qab"]),
        (
            ["Q", "QAct\nObservation: 4", "QAct\nObservation: 4Act\nObservation: 5"],
            ["Act\nObservation:", "Act\nObservation:", "9"],
            ["Q", "QAct\nObservation: 4", "QAct\nObservation: 4Act\nObservation: 5"],
        ),
        (["Q", "Q4\0 and"], ["4\0", "5"], ["Q", "Q4\0 and"]),
        (["Q", "Qhaha"], ["ha", "ha"], ["Q", "Qhaha"]),
    ],
    ids=["no answer", "no answer, more", "no second answer", "stop string", "end token", "said twice"],
)
def test_the_engine_reads_the_text_that_the_agent_sent(prompts, answers, seen):
    left = iter(answers)
    engine = Ends(lambda text, index: next(left))

    async def work(gateway, session, client):
        for prompt in prompts:
            answer = await client.post("/completions", json={"prompt": prompt})
            assert answer.status_code == 200, answer.text

    with_session(work, engine)
    assert engine.asked == seen


@pytest.mark.parametrize("key", [None, "wrong", "Bearer", "ключ"])
def test_without_the_key_nothing_is_answered_but_health(key):
    async def work(gateway, session, client):
        headers = {} if key is None else {b"Authorization": f"Bearer {key}".encode()}
        root = gateway.url.removesuffix("/v1")
        async with httpx.AsyncClient(verify=False) as stranger:
            answers = [
                await stranger.get(f"{root}{path}", headers=headers) for path in ("/health", "/v1/models")
            ]
            for path in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"):
                answers.append(await stranger.post(root + path, headers=headers, content=b"{}"))
        return [answer.status_code for answer in answers]

    assert with_session(work) == [200, 401, 401, 401, 401]


def test_a_session_that_has_ended_answers_no_more():
    async def work(gateway, session, client):
        gateway.end(session)
        return (await client.post("/chat/completions", json={"messages": USER})).status_code

    assert with_session(work) == 401


def test_a_prompt_that_is_too_long_for_another_model_fills_the_session_too():
    async def work(gateway, session, client):
        other = session.beside(Scripted(lambda text, index: "ok").ask, "base")
        with pytest.raises(RequestError, match="maximum context length"):
            await other.chat([{"role": "user", "content": "x" * 5000}], None, {})
        return session.is_full

    assert with_session(work)


def test_it_listens_on_loopback_alone():
    with Gateway(Letters(), 4000) as gateway:
        port = gateway._socket.getsockname()
    assert port[0] == "127.0.0.1"


@pytest.mark.slow
def test_200_sessions_beside_20_broken_clients(monkeypatch):
    monkeypatch.setattr(gateways, "ARRIVES_WITHIN_S", 3.0)
    monkeypatch.setattr(gateways, "MAX_BODY_BYTES", 2**16)
    engine = Scripted(lambda text, index: "ok", delay_s=0.02)
    slow = Scripted(lambda text, index: "late", delay_s=60.0)

    async def agent(gateway, number):
        session = session_of(gateway, engine)
        async with http(gateway, session) as client:
            messages = [{"role": "user", "content": f"q{number}"}]
            for turn in range(3):
                answer = await chat(client, messages)
                messages += [answer["choices"][0]["message"], {"role": "user", "content": f"t{turn}"}]
        gateway.end(session)
        return session.rollout(RECORD).text

    async def broken(gateway, session, kind):
        """Send a malformed or interrupted request; return the response."""
        reader, writer = await asyncio.open_connection(*gateway._socket.getsockname())
        key = session.key if kind != "wrong key" else "wrong"
        body = json.dumps({"messages": USER, "stream": True}).encode()
        size = {"huge": 2**40, "half body": len(body) + 9}.get(kind, len(body))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Length: {size}\r\n\r\n"
        if kind == "half head":
            writer.write(head[:40].encode())
        elif kind == "huge":
            writer.write(head.encode() + b" " * 2**17)
        elif kind == "noise":
            writer.write(bytes(range(256)))
        else:
            writer.write(head.encode() + body)
        if kind in ("gone", "reset"):
            await asyncio.sleep(0.3)
            if kind == "reset":
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                )
            writer.close()
            return b""
        if kind == "silent":
            await asyncio.sleep(2)
            return b""
        try:
            return await asyncio.wait_for(reader.read(4096), 20)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    kinds = [
        "half head",
        "half body",
        "huge",
        "wrong key",
        "noise",
        "gone",
        "reset",
        "silent",
        "half head",
        "half body",
    ]

    async def run():
        with Gateway(Letters(), 4000) as gateway:
            waits = session_of(gateway, slow)
            strange = [broken(gateway, waits, kind) for kind in kinds * 2]
            strange_work = asyncio.gather(*strange)
            texts = await asyncio.gather(*(agent(gateway, number) for number in range(200)))
            answers = await strange_work
            await asyncio.sleep(0.3)
            # The engine stops sampling for clients that have gone.
            gone = len(slow.given_up)
            session = session_of(gateway, engine)
            async with http(gateway, session) as client:
                await chat(client, USER)
            with pytest.raises(RolloutError):
                waits.rollout(RECORD)
            return texts, answers[: len(kinds)], gone

    texts, answers, gone = asyncio.run(run())
    assert texts == ["ok\n<u>t0\n<a>ok\n<u>t1\n<a>ok"] * 200
    codes = [answer.split(b" ", 2)[1] if answer else b"" for answer in answers]
    assert codes == [b"", b"408", b"413", b"401", b"400", b"", b"", b"", b"", b"408"]
    assert gone == 6
