"""Agents' requests with images become rollouts with their images."""

import asyncio
import base64
import io

import httpx
import pytest
from kit.gateway_client import session_of
from kit.vision_models import picture, save_vlm

from vectorlm.data.images import image_tokens_of, picture_of, pictures_of
from vectorlm.rl.agents.gateway import Gateway
from vectorlm.train.load import load_tokenizer
from vectorlm.types import Completion, PromptRecord

LENGTH = 70


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_vlm("qwen2.5-vl", tmp_path_factory.mktemp("vlm") / "model"))


class Engine:
    """An engine that answers with `token_ids` and records its requests."""

    def __init__(self, token_ids):
        self.token_ids, self.asked = token_ids, []

    async def ask(self, prompt, params, hear=None):
        self.asked.append(prompt)
        count = len(self.token_ids)
        return [Completion(tuple(prompt), self.token_ids, (-1.0,) * count, (0,) * count, "yes", "stop")]


def with_session(tokenizer, engine, work):
    async def run():
        with Gateway(tokenizer, LENGTH) as gateway:
            session = session_of(gateway, engine, tokenizer=tokenizer)
            headers = {"Authorization": f"Bearer {session.key}"}
            async with httpx.AsyncClient(
                base_url=gateway.url, headers=headers, timeout=30, verify=False
            ) as client:
                return await work(session, client)

    return asyncio.run(run())


def data_url(image):
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def user(url, text="what?"):
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


ANSWER = {"role": "assistant", "content": "yes"}


async def ask(client, *messages):
    return await client.post("/chat/completions", json={"model": "policy", "messages": list(messages)})


def test_a_conversation_with_images_is_one_row_with_its_pictures(tokenizer, tmp_path):
    file, engine = tmp_path / "screen.png", Engine(tuple(tokenizer.encode("yes")))

    async def work(session, client):
        picture("r").save(file)
        first = user(file.as_uri())
        assert (await ask(client, first)).status_code == 200
        # The next screen has the same file name; the rollout must keep the content of the first one.
        picture("b", (112, 56)).save(file)
        second = user(data_url(picture("b", (112, 56))), "so?")
        answer = await ask(client, user(data_url(picture("r"))), ANSWER, second)
        assert answer.status_code == 200, answer.text
        return session.rollout(PromptRecord("q"))

    rollout = with_session(tokenizer, engine, work)
    assert [len(pictures_of(prompt)) for prompt in engine.asked] == [1, 2]
    assert rollout.branches == ()
    assert rollout.num_turns == 2
    assert rollout.pictures == (picture_of(picture("r")), picture_of(picture("b", (112, 56))))
    tokens = image_tokens_of(tokenizer)
    expanded, placed = rollout.with_expanded(tokens, 0)
    assert [one.picture for one in placed] == list(rollout.pictures)
    whole = [*rollout.prompt_token_ids, *rollout.token_ids]
    assert len(expanded.prompt_token_ids) + len(expanded.token_ids) == tokens.length(whole, rollout.pictures)
    assert whole == [*engine.asked[1], *engine.token_ids]


def test_other_pictures_begin_another_row(tokenizer):
    engine = Engine(tuple(tokenizer.encode("yes")))

    async def work(session, client):
        for colour in ("r", "b"):
            answer = await ask(client, user(data_url(picture(colour))))
            assert answer.status_code == 200, answer.text
        await ask(client, user(data_url(picture("b"))), ANSWER, {"role": "user", "content": "so?"})
        return session.rollout(PromptRecord("q"))

    rollout = with_session(tokenizer, engine, work)
    assert rollout.pictures == (picture_of(picture("b")),)
    assert [branch.pictures for branch in rollout.branches] == [(picture_of(picture("r")),)]


def test_images_of_anthropics_form_are_those_of_openais(tokenizer):
    engine = Engine(tuple(tokenizer.encode("yes")))
    encoded = data_url(picture("r")).partition(",")[2]
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}
    seen = {"type": "image", "source": {"type": "url", "url": data_url(picture("b"))}}
    asked = {"role": "user", "content": [shown, {"type": "text", "text": "colour?"}, seen]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "it"}, shown]}

    async def work(session, client):
        for messages in ([asked], [asked, ANSWER, {"role": "user", "content": [result]}]):
            body = {"model": "policy", "max_tokens": 4, "messages": messages}
            answer = await client.post("/messages", json=body)
            assert answer.status_code == 200, answer.text
        parts = [{"type": "image_url", "image_url": {"url": data_url(picture(name))}} for name in "rb"]
        parts.insert(1, {"type": "text", "text": "colour?"})
        assert (await ask(client, {"role": "user", "content": parts})).status_code == 200

    with_session(tokenizer, engine, work)
    first, second, third = engine.asked
    assert first == third
    red, blue = picture_of(picture("r")), picture_of(picture("b"))
    assert [pictures_of(prompt) for prompt in (first, second)] == [(red, blue), (red, blue, red)]


@pytest.mark.parametrize("url", ["file:///nowhere.png", "https://example.org/a.png", "data:;base64,AAAA"])
def test_an_image_that_cannot_be_read_is_refused_by_its_message(tokenizer, url):
    async def work(session, client):
        return await ask(client, {"role": "user", "content": "a"}, user(url))

    answer = with_session(tokenizer, Engine((10,)), work)
    assert answer.status_code == 400
    assert "messages" in answer.json()["error"]["message"]


def test_the_tokens_of_images_count_in_the_length(tokenizer):
    async def work(session, client):
        assert (await ask(client, user(data_url(picture("r"))))).status_code == 200
        return await ask(
            client, user(data_url(picture("r", (224, 224)))), ANSWER, user(data_url(picture("r")))
        )

    answer = with_session(tokenizer, Engine(tuple(tokenizer.encode("yes"))), work)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_conversation_ends_after_a_sampled_image_token(tokenizer):
    sampled = (10, image_tokens_of(tokenizer).image_token)

    async def work(session, client):
        first = user(data_url(picture("r")))
        assert (await ask(client, first)).status_code == 200
        answer = await ask(client, first, ANSWER, {"role": "user", "content": "so?"})
        return answer, session.rollout(PromptRecord("q"))

    answer, rollout = with_session(tokenizer, Engine(sampled), work)
    assert answer.status_code == 400
    assert (rollout.num_turns, rollout.finish_reason) == (1, "length")
