"""Anthropic's Messages API: requests of Anthropic's client become rollouts, token by token."""

import asyncio
import json

import httpx
import pytest
from kit.gateway_client import Scripted, session_of
from kit.letters import Letters

from vectorlm.errors import EngineError
from vectorlm.rl.agents.gateway import Gateway
from vectorlm.types import PromptRecord

anthropic = pytest.importorskip("anthropic")
USER = [{"role": "user", "content": "Hi"}]
RECORD = PromptRecord("Hi")
WEATHER = {"name": "weather", "description": "", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


def with_client(work, answer=lambda text, index: "yes", **more):
    """Return what ``await work(client, session, gateway)`` returns, and the engine."""
    engine = answer if isinstance(answer, Scripted) else Scripted(answer)

    async def run():
        with Gateway(Letters(), 200) as gateway:
            session = session_of(gateway, engine, **more)
            async with anthropic.AsyncAnthropic(
                base_url=gateway.url, api_key=session.key, max_retries=0
            ) as client:
                return await work(client, session, gateway)

    return asyncio.run(run()), engine


async def ask(client, messages, **more):
    return await client.messages.create(model="policy", messages=messages, max_tokens=40, **more)


def test_a_conversation_is_one_rollout_with_the_tokens_that_were_sampled():
    async def work(client, session, gateway):
        first = await ask(
            client, USER, system=[{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]
        )
        assert (first.content[0].text, first.stop_reason, first.stop_sequence) == ("yes", "end_turn", None)
        assert (first.usage.input_tokens, first.usage.output_tokens) == (len("<s>Be\n<u>Hi\n<a>"), 3)
        chat = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": "So?"}]
        second = await ask(client, chat, system="Be", extra_body={"temperature": 1.0})
        assert second.content[0].text == "yes"
        return session.rollout(RECORD)

    found, _ = with_client(work)
    assert (found.num_turns, found.branches) == (2, ())
    assert found.text == "yes\n<u>So?\n<a>yes"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_is_called_and_its_result_continues_the_rollout(is_streamed):
    async def work(client, session, gateway):
        if is_streamed:
            async with client.messages.stream(
                model="policy", messages=USER, max_tokens=99, tools=[WEATHER]
            ) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await ask(client, USER, tools=[WEATHER])
        assert answer.stop_reason == "tool_use"
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert (call.name, call.input) == ("weather", {"city": "Oslo"})
        told = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "-3"}]}
        content = [block.model_dump() for block in answer.content]
        chat = [*USER, {"role": "assistant", "content": content}, {"role": "user", "content": [told]}]
        last = await ask(client, chat, tools=[WEATHER], tool_choice={"type": "auto"})
        assert last.content[0].text == "Cold."
        return session.rollout(RECORD)

    found, _ = with_client(work, lambda text, index: "Cold." if "<t>" in text else CALL)
    assert found.text == f"{CALL}\n<t>-3\n<a>Cold."
    assert found.branches == ()


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_call_with_a_number_that_json_does_not_have_is_text(number):
    said = CALL.replace('"Oslo"', number)

    async def work(client, session, gateway):
        return await ask(client, USER, tools=[WEATHER])

    answer, _ = with_client(work, lambda text, index: said)
    assert [block.type for block in answer.content] == ["text"]


def test_text_is_streamed_as_it_is_sampled_and_adds_up_to_the_answer():
    async def work(client, session, gateway):
        texts = []
        async with client.messages.stream(model="policy", messages=USER, max_tokens=9) as stream:
            async for text in stream.text_stream:
                texts.append(text)
                read.set()
            message = await stream.get_final_message()
        return texts, message, session.rollout(RECORD)

    read = asyncio.Event()
    # The engine samples the second token after the client has read the first one.
    engine = Scripted(
        lambda text, index: "yes",
        may_go_on=lambda place: asyncio.wait_for(read.wait(), 20) if place else asyncio.sleep(0),
    )
    (texts, message, found), _ = with_client(work, engine)
    assert [text for text in texts if text] == ["y", "e", "s"]
    assert (message.content[0].text, message.stop_reason) == ("yes", "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len("<u>Hi\n<a>"), 3)
    assert found.text == "yes"


def test_the_limit_and_the_stop_sequences_reach_the_engine():
    async def work(client, session, gateway):
        return await client.messages.create(
            model="policy", messages=USER, max_tokens=7, stop_sequences=["."], extra_body={"top_k": 0}
        )

    _, engine = with_client(work)
    assert (engine.params[0]["max_tokens"], engine.params[0]["stop"]) == (7, ["."])


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"messages": [{"role": "user", "content": "a" * 300}]}, anthropic.BadRequestError),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
        ),
        (
            {
                "messages": [
                    *USER,
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "x",
                                "content": [{"type": "image", "source": {}}],
                            }
                        ],
                    },
                ]
            },
            anthropic.BadRequestError,
        ),
        ({"messages": USER, "extra_body": {"temperature": 0.5}}, anthropic.BadRequestError),
        ({"messages": USER, "tools": [WEATHER], "tool_choice": {"type": "any"}}, anthropic.BadRequestError),
        (
            {"messages": USER, "thinking": {"type": "enabled", "budget_tokens": 1024}},
            anthropic.BadRequestError,
        ),
        ({"messages": USER, "model": "other"}, anthropic.NotFoundError),
    ],
)
def test_what_cannot_be_answered_is_refused_in_anthropic_s_form(asked, error):
    async def work(client, session, gateway):
        with pytest.raises(error) as caught:
            await client.messages.create(**{"model": "policy", "max_tokens": 9, **asked})
        return caught.value.body

    body, engine = with_client(work)
    assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    assert engine.asked == []


def test_thinking_that_is_disabled_asks_for_nothing():
    async def work(client, session, gateway):
        return await ask(client, USER, thinking={"type": "disabled"}, metadata={"user_id": "me"})

    answer, _ = with_client(work)
    assert answer.content[0].text == "yes"


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_the_key_is_taken_from_either_header_and_a_wrong_one_is_an_authentication_error(header):
    async def work(client, session, gateway):
        async with httpx.AsyncClient(base_url=gateway.url) as raw:
            found = []
            for key in (session.key, "wrong"):
                value = key if header == "x-api-key" else f"Bearer {key}"
                body = {"messages": USER, "max_tokens": 3}
                found.append(await raw.post("/messages", json=body, headers={header: value}))
            return found

    (right, wrong), _ = with_client(work)
    assert right.json()["content"] == [{"type": "text", "text": "yes"}]
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")


def test_what_fails_in_a_stream_is_told_in_anthropic_s_form():
    async def fail(place):
        if place == 2:
            raise EngineError("no room")

    async def work(client, session, gateway):
        headers = {"x-api-key": session.key}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as raw:
            body = {"messages": USER, "max_tokens": 3, "stream": True}
            return (await raw.post("/messages", json=body)).text

    text, _ = with_client(work, Scripted(lambda text, index: "yes", may_go_on=fail))
    *_, last = text.strip().split("\n\n")
    head, data = last.split("\n")
    assert head == "event: error"
    expected = {"type": "invalid_request_error", "message": "no room"}
    assert json.loads(data.removeprefix("data: ")) == {"type": "error", "error": expected}
