"""Environments of OpenEnv over its protocol, with an echo server that answers as OpenEnv 0.10 does."""

import asyncio
import contextlib
import json
import threading

import pytest
from websockets.sync.server import serve

from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.rl.environments import remote
from vectorlm.rl.environments.openenv import OpenEnv
from vectorlm.rl.environments.remote import EnvironmentWorkers, RemoteEnvironment
from vectorlm.runs.preflight.user_code import require_environment
from vectorlm.types import PromptRecord

NAME = "vectorlm.rl.environments.openenv:OpenEnv"


@contextlib.contextmanager
def echoing():
    """Serve sessions that echo, reward the length, and end at "end"; yield the URL and all messages."""
    seen = []

    def session(socket):
        for text in socket:
            asked = json.loads(text)
            seen.append(asked)
            if asked["type"] == "close":
                return
            data, said = asked.get("data", {}), {"echoed_message": ""}
            if asked["type"] == "reset":
                said = {"echoed_message": f"seed {data.get('seed')}", "metadata": {}}
            elif set(data) != {"message"}:
                error = {"message": "no such field", "code": "VALIDATION_ERROR"}
                socket.send(json.dumps({"type": "error", "data": error}))
                continue
            else:
                said = {
                    "echoed_message": data["message"],
                    "message_length": len(data["message"]),
                    "metadata": {},
                }
            text = data.get("message", "")
            answer = {"observation": said, "reward": len(text) or None, "done": text == "end"}
            socket.send(json.dumps({"type": "observation", "data": answer}))

    with serve(session, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}/", seen
        finally:
            server.shutdown()
            thread.join()


def test_an_episode_goes_over_the_socket_in_a_worker():
    require_environment(OpenEnv, NAME)

    async def episode(url, turns):
        columns = {"openenv_url": url, "openenv_reset": {"seed": 7}}
        record = PromptRecord([{"role": "user", "content": "Say it."}], columns)
        with WorkerPool(1) as pool:
            playing = RemoteEnvironment(EnvironmentWorkers(NAME, pool, 20.0), record)
            try:
                return await playing.reset(), [(await playing.step(text))[1] for text in turns]
            finally:
                await playing.close()

    with echoing() as (url, seen):
        asked, (first, last) = asyncio.run(episode(url, ["hello", '{"message": "end"}']))
        assert [message["content"] for message in asked] == ["Say it.", "seed 7"]
        assert json.loads(first.messages[0]["content"]) == {"echoed_message": "hello", "message_length": 5}
        assert (first.reward, first.done, last.reward, last.done) == (5, False, 3, True)
        assert [request["type"] for request in seen] == ["reset", "step", "step", "close"]
        # The policy gets the error of its action, and the episode continues.
        deep = '{"message": ' + "[" * 1100
        _, replies = asyncio.run(episode(url, ['{"other": 1}', deep, '<think>{"other": 1}</think>end']))
        assert replies[0].messages == [{"role": "user", "content": "error: no such field (VALIDATION_ERROR)"}]
        assert json.loads(replies[1].messages[0]["content"])["echoed_message"] == deep
        assert [reply.metrics["refused_actions"] for reply in replies] == [1, 1, 1]
        assert (replies[2].reward, replies[2].done) == (3, True)


def test_a_worker_answers_a_server_s_pings_between_calls():
    sockets = []

    def session(socket):
        sockets.append(socket)
        for text in socket:
            if json.loads(text)["type"] == "close":
                return
            socket.send(json.dumps({"type": "observation", "data": {"observation": {"text": "hello"}}}))

    async def call(worker, function, *arguments):
        return [value async for value in worker.run(f"{remote.__name__}:{function}", *arguments)][-1]

    async def begin(pool, columns):
        async with pool.worker() as worker:
            prompt = [{"role": "user", "content": "Say it."}]
            (*_, begun), _ = await call(worker, "play_shared", 0, "begin", NAME, NAME, prompt, columns)
            # After a synchronous call the worker has no task, but its session is still open.
            assert await call(worker, "describe", NAME, NAME, columns)
            answered = await asyncio.to_thread(sockets[0].ping().wait, 10)
            await call(worker, "play_shared", 0, "end")
            return begun, answered

    with serve(session, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        try:
            with WorkerPool(1) as pool:
                begun, answered = pool.submit(begin(pool, {"openenv_url": url})).result()
        finally:
            server.shutdown()
            thread.join()
    assert begun["content"] == "hello"
    assert answered


@pytest.mark.slow
def test_a_reset_that_the_server_refuses_is_an_error():
    def refuse(socket):
        socket.recv()
        socket.send(json.dumps({"type": "error", "data": {"message": "no seed", "code": "EXECUTION_ERROR"}}))

    async def begin(url):
        playing = OpenEnv()
        try:
            await playing.reset({"openenv_url": url})
        finally:
            await playing.close()

    with serve(refuse, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"refused 'reset': no seed \(EXECUTION_ERROR\)"):
            asyncio.run(begin(url))
        server.shutdown()
        thread.join()
