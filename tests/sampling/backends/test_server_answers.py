"""Servers that answer nonsense or nothing: a clear error before the deadline.

The tests cover sampling servers, and servers that score tokens for distillation.
"""

import json
import pickle
import resource
import threading
import time
import warnings
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kit.rank_processes import on_ranks

from vectorlm import SamplingEngine
from vectorlm.errors import ConfigError, EngineDied, EngineError, EngineTimeout, TokenRefused
from vectorlm.sampling.arguments import with_deadlines
from vectorlm.sampling.backends.server import backend as server_backend
from vectorlm.sampling.backends.server import client
from vectorlm.sampling.backends.server.backend import VLLMServer
from vectorlm.sampling.backends.server.client import ROWS_PER_REQUEST, ScoringServer
from vectorlm.sampling.settings import EngineSettings
from vectorlm.sampling.weights.wire import append_answer

TOKEN = "a token for this test"
SETTINGS = {
    "max_num_seqs": 4,
    "max_model_len": 64,
    "logprobs_mode": "processed_logprobs",
    "has_loaded": False,
    "is_whole": True,
    "device": "cpu",
}
ANSWERS = {"vectorlm_settings": SETTINGS, "vectorlm_begin": False, "vectorlm_prepare": "live"}
PATIENCE_S = 1.0
RESTS_S = 0.3
FATAL_PROMPT = [2, 61]
"""After a request with this prompt, the server does not answer."""
ROWS = [[2, 3, 4, 5], [6, 7], [8, 9, 10]]
CHOICE = {
    "index": 0,
    "token_ids": [5, 6],
    "text": "ab",
    "finish_reason": "stop",
    "logprobs": None,
    "weight_versions": [{"version": -1, "start": 0, "end": 2}],
}


class Answers(BaseHTTPRequestHandler):
    """A handler that answers as vLLM does, except for the answers in `server.odd`, by path."""

    def do_GET(self):
        self.answer(f"vllm:iteration_tokens_total_count{{}} {self.server.num_steps}", "text/plain")

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = json.loads(body or "null")
        if asked and FATAL_PROMPT in asked.values():
            self.server.odd |= {self.path: None, "/weight_info": None}
        if self.path == "/inference/v1/generate":
            self.server.limits.append(asked["sampling_params"]["max_tokens"])
            text = json.dumps({"choices": [CHOICE]})
        elif self.path == "/init_weight_transfer_engine" and self.path not in self.server.odd:
            call = asked["init_info"]
            append_answer(call["answers"], call["number"], (ANSWERS.get(call["method"]), None))
            text = "{}"
        elif self.path == "/v1/completions":
            self.server.asked.append((asked["prompt"], self.headers.get("Authorization")))
            choices = [self.score(index, row) for index, row in enumerate(asked["prompt"])]
            text = json.dumps({"choices": choices[::-1]})
        else:
            text = json.dumps({"success": True, "tokens": [2, 3]})
        self.answer(text)

    def score(self, index, row):
        """Score each token by its position in its row."""
        scores = [{str(token): {"logprob": self.server.factor * place}} for place, token in enumerate(row)]
        return {"index": index, "prompt_logprobs": [None, *scores[1:]]}

    def answer(self, text, kind="application/json"):
        text = self.server.odd.get(self.path, text)
        if text is None:
            time.sleep(10 * PATIENCE_S)
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        """Print nothing."""


class HangsUp(Answers):
    """A handler that closes an idle connection without an answer when the next request arrives on it."""

    protocol_version = "HTTP/1.1"
    heard_at = float("inf")

    def parse_request(self):
        rested_s, self.heard_at = time.monotonic() - self.heard_at, time.monotonic()
        return rested_s < RESTS_S and super().parse_request()


class Gated(Answers):
    """A handler that answers requests only once `server.gate` is open."""

    def answer(self, text, kind="application/json"):
        if self.path == "/inference/v1/generate":
            self.server.gate.wait()
        super().answer(text, kind)


class HasAnotherToken(Answers):
    """A handler that refuses the token of every call except health checks."""

    def do_POST(self):
        self.send_error(401)


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads, server.odd, server.asked, server.factor = True, {}, [], -1
    server.limits, server.num_steps = [], 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def connect(server, silence_s=PATIENCE_S, **more):
    url = f"http://127.0.0.1:{server.server_address[1]}"
    return VLLMServer("model", receiver="auto", url=url, token=TOKEN, silence_s=silence_s, **more)


def sample(backend):
    backend.submit("0-0", [2, 3], {"max_tokens": 2})
    return wait_for_answer(backend)


def wait_for_answer(backend):
    deadline = time.monotonic() + 5 * PATIENCE_S
    while time.monotonic() < deadline:
        if found := backend.poll():
            return found
    raise AssertionError("the request has vanished")


def test_an_answer_as_vllm_gives_it_is_taken(server):
    backend = connect(server)
    (output,) = sample(backend)
    assert output.error is None
    assert output.completions[0].token_ids == (5, 6)
    backend.close()


@pytest.mark.parametrize(("longest", "limits"), [(None, [None, 2, 70]), (64, [62, 2, 62]), (4, [2, 2, 2])])
def test_a_server_with_more_room_than_the_run_is_held_to_the_run_s(server, longest, limits):
    """The trainer has no room for longer rows, and the server's `--max-model-len` may be larger."""
    with closing(connect(server, max_model_len=longest)) as backend:
        for index, asked in enumerate((None, 2, 70)):
            backend.submit(f"0-{index}", [2, 3], {"max_tokens": asked})
            wait_for_answer(backend)
        assert server.limits == limits
        if longest == 4:
            with pytest.raises(EngineError, match="4 tokens"):
                backend.submit("0-3", [2] * 4, {"max_tokens": 1})


def test_a_connection_that_rested_is_not_used_again(server, monkeypatch):
    monkeypatch.setattr(server_backend, "KEEPALIVE_S", RESTS_S / 2)
    server.RequestHandlerClass = HangsUp
    with closing(connect(server)) as backend:
        time.sleep(2 * RESTS_S)
        (output,) = sample(backend)
        assert output.error is None


@pytest.mark.parametrize(
    "odd",
    [
        "[]",
        "{}",
        '{"choices": 3}',
        '{"choices": [{"index": 0}]}',
        "{broken",
        json.dumps({"choices": [{**CHOICE, "weight_versions": [{"version": "x", "start": 0, "end": 2}]}]}),
        json.dumps({"choices": [{**CHOICE, "weight_versions": [{"version": 1, "start": 0, "end": 1}]}]}),
        json.dumps({"choices": [{**CHOICE, "token_ids": ["a", "b"]}]}),
        json.dumps({"choices": [{**CHOICE, "finish_reason": "bored"}]}),
        json.dumps({"choices": [{**CHOICE, "logprobs": {"content": [{"logprob": "much"}]}}]}),
        "null",
    ],
)
def test_nonsense_in_place_of_completions_is_the_requests_error(server, odd):
    backend = connect(server)
    server.odd["/inference/v1/generate"] = odd
    (output,) = sample(backend)
    assert isinstance(output.error, EngineError)
    assert "no vLLM server" in str(output.error)
    assert odd[:20] in str(output.error)
    server.odd.clear()
    assert sample(backend)[0].error is None
    backend.close()


@pytest.mark.parametrize(("odd", "text"), [("[]", "no worker"), ("nothing", "no vLLM server")])
def test_nonsense_at_the_start_is_an_error(server, odd, text):
    server.odd["/init_weight_transfer_engine"] = odd
    with pytest.raises(EngineError, match=text):
        connect(server)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/health", "/init_weight_transfer_engine", "/update_weight_version"])
def test_a_server_that_stays_mute_at_the_start_is_an_error_in_time(server, path):
    server.odd[path] = None
    start = time.monotonic()
    with pytest.raises(EngineTimeout, match=path):
        connect(server, start_timeout_s=PATIENCE_S)
    assert time.monotonic() - start < 8 * PATIENCE_S


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/pause?mode=keep&clear_cache=false"])
def test_a_server_that_falls_silent_later_is_an_error_in_time(server, path):
    backend = connect(server)
    server.odd |= {path: None, "/weight_info": None}
    start = time.monotonic()
    wait = (lambda: sample(backend)) if "generate" in path else backend.pause
    with pytest.raises(EngineTimeout):
        wait()
    assert time.monotonic() - start < 8 * PATIENCE_S
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/inference/v1/generate", "/pause?mode=keep&clear_cache=false"])
def test_a_server_that_ends_and_keeps_its_requests_is_named_before_it_has_been_silent_for_long(server, path):
    def end():
        # When uvicorn is told to end, it stops listening and waits for requests in flight.
        server.shutdown()
        server.server_close()

    server.odd[path] = None
    with closing(connect(server, silence_s=4 * PATIENCE_S)) as backend:
        ending = threading.Timer(PATIENCE_S, end)
        ending.start()
        with pytest.raises(EngineDied):
            sample(backend) if "generate" in path else backend.pause()
        ending.join()


def test_requests_beyond_the_limit_of_open_files_wait_and_no_time_out_counts_that(server, monkeypatch):
    limits = {"soft": 4, "hard": 8}
    monkeypatch.setattr(resource, "getrlimit", lambda what: tuple(limits.values()))
    monkeypatch.setattr(resource, "setrlimit", lambda what, pair: limits.update(soft=pair[0]))
    monkeypatch.setattr(server, "gate", threading.Event(), raising=False)
    server.RequestHandlerClass = Gated
    with closing(connect(server)) as backend:
        assert limits == {"soft": 8, "hard": 8}
        for index in range(20):
            backend.submit(f"0-{index}", [2, 3], {"max_tokens": 2})
        deadline = time.monotonic() + 1.5 * PATIENCE_S
        while time.monotonic() < deadline:
            server.num_steps += 1
            assert backend.poll() == []
        assert len(server.limits) == 6
        server.gate.set()
        answers = []
        while len(answers) < 20:
            answers += wait_for_answer(backend)
        assert all(answer.error is None for answer in answers)


def test_a_connection_that_is_lost_while_requests_are_in_flight_is_survived(server, monkeypatch):
    with closing(connect(server, silence_s=4 * PATIENCE_S)) as backend:
        call, lost = backend._call, []

        async def lose_one(path, *arguments, **how):
            if path == "/weight_info" and not lost:
                lost.append(path)
                raise EngineDied("connection lost")
            return await call(path, *arguments, **how)

        monkeypatch.setattr(backend, "_call", lose_one)
        server.odd["/inference/v1/generate"] = None
        backend.submit("0-0", [2, 3], {"max_tokens": 2})
        deadline = time.monotonic() + 3 * PATIENCE_S
        while time.monotonic() < deadline:
            assert backend.poll() == []
        assert lost


@pytest.mark.slow
def test_a_request_that_a_living_server_has_lost_is_an_error_in_time(server):
    server.odd["/inference/v1/generate"] = None
    with closing(connect(server)) as backend:
        # While the server computes for any client, an answer may still arrive.
        backend.submit("0-0", [2, 3], {"max_tokens": 2})
        deadline = time.monotonic() + 3 * PATIENCE_S
        while time.monotonic() < deadline:
            server.num_steps += 1
            assert backend.poll() == []
        with pytest.raises(EngineTimeout, match="computed nothing"):
            wait_for_answer(backend)


def test_the_time_of_an_update_is_not_the_server_s_silence(server):
    server.odd["/inference/v1/generate"] = None
    with closing(connect(server)) as backend:
        backend.submit("0-0", [2, 3], {"max_tokens": 2})
        backend.pause()
        time.sleep(1.5 * PATIENCE_S)
        backend.resume()
        assert backend.poll() == []


@pytest.mark.slow
def test_after_a_call_without_an_answer_the_server_is_not_waited_for_again(server):
    backend = connect(server, silence_s=3 * PATIENCE_S)
    server.odd |= dict.fromkeys(["/pause?mode=keep&clear_cache=false", "/resume"])
    with pytest.raises(EngineTimeout, match="/pause"):
        backend.pause()
    start = time.monotonic()
    backend.resume()
    assert time.monotonic() - start < PATIENCE_S
    server.odd.clear()
    backend.pause()
    backend.load(1, None, (), recompute=False)
    server.odd["/resume"] = None
    with pytest.raises(EngineTimeout, match="/resume"):
        backend.resume()
    backend.close()


def sample_until_it_freezes(topology, url):
    arguments = {"url": url, "token": TOKEN, "silence_s": PATIENCE_S}
    with SamplingEngine("a-model", topology=topology, inference="server", **arguments) as engine:
        assert engine.sample([[2, 3]], {"max_tokens": 2})[0][0].token_ids == (5, 6)
        start = time.monotonic()
        with pytest.raises(EngineTimeout) as caught:
            engine.sample([FATAL_PROMPT], {"max_tokens": 2})
        return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("has_loaded", [True, False], ids=["written", "not"])
def test_whoever_connects_is_told_of_an_earlier_trainers_weights(server, monkeypatch, has_loaded):
    monkeypatch.setitem(SETTINGS, "has_loaded", has_loaded)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    arguments = {"inference": "server", "url": url, "token": TOKEN, "channel": "inline"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)

        def is_told():
            return any("earlier trainer" in str(warning.message) for warning in caught)

        with SamplingEngine(".", **arguments) as engine:
            engine.wait_until_ready()
            assert not is_told(), "a run updates first"
            engine.submit([[5]])
    assert is_told() == has_loaded


@pytest.mark.slow
def test_a_server_that_freezes_is_an_error_on_every_rank_in_time(server):
    url = f"http://127.0.0.1:{server.server_address[1]}"
    for text, seconds in on_ranks(2, sample_until_it_freezes, url):
        assert f"silent for {PATIENCE_S:g} s while generating" in text
        assert seconds < 8 * PATIENCE_S


def scorer(server, timeout_s=10.0):
    return ScoringServer(f"http://127.0.0.1:{server.server_address[1]}/", timeout_s)


def test_rows_are_asked_for_in_parts_and_come_back_in_their_order(server, monkeypatch):
    monkeypatch.setenv("VECTORLM_TEACHER_TOKEN", "a secret")
    rows = [[7] * (2 + index % 3) for index in range(2 * ROWS_PER_REQUEST + 5)]
    assert scorer(server).logprobs(rows) == [[0.0, *(-float(n) for n in range(1, len(row)))] for row in rows]
    assert sorted(len(rows) for rows, _ in server.asked) == [5, ROWS_PER_REQUEST, ROWS_PER_REQUEST]
    assert {token for _, token in server.asked} == {"Bearer a secret"}
    assert scorer(server).logprobs([]) == []


@pytest.mark.parametrize(
    "odd",
    [
        "[]",
        '{"choices": []}',
        '{"choices": [{"index": 0}, {"index": 1}, {"index": 2}]}',
        "{broken",
        json.dumps(
            {"choices": [{"index": n, "prompt_logprobs": [None, {"1": {"logprob": -1}}]} for n in range(3)]}
        ),
    ],
)
def test_nonsense_in_place_of_scores_is_an_error_with_what_was_said(server, odd):
    server.odd["/v1/completions"] = odd
    with pytest.raises(EngineError, match="no vLLM server") as caught:
        scorer(server).logprobs(ROWS)
    assert odd[:20] in str(caught.value)


def test_a_scoring_server_that_stays_mute_is_an_error_in_time(server):
    server.odd["/v1/completions"] = None
    with pytest.raises(EngineTimeout, match="/v1/completions"):
        scorer(server, 0.5).logprobs(ROWS)


def test_the_time_limit_of_a_scoring_call_begins_when_it_is_sent(server, monkeypatch):
    running, most, call_server = [], [], client.call_server

    async def count(*arguments, **options):
        running.append(0)
        most.append(len(running))
        try:
            return await call_server(*arguments, **options)
        finally:
            running.pop()

    monkeypatch.setattr(client, "call_server", count)
    monkeypatch.setattr(client, "NUM_CONNECTIONS", 2)
    rows = [[7, 8]] * (5 * ROWS_PER_REQUEST)
    assert len(scorer(server).logprobs(rows)) == len(rows)
    assert (len(most), max(most)) == (5, 2)


def test_logits_are_told_from_log_probabilities(server):
    server.factor = 1
    with pytest.raises(ConfigError, match="token 5 a log-probability of 3"):
        scorer(server).logprobs(ROWS)


def test_no_scoring_server_is_an_error_with_the_address():
    with pytest.raises(EngineDied):
        ScoringServer("http://127.0.0.1:9").logprobs(ROWS)


def test_the_server_gets_less_patience_than_the_sampler_process_so_that_the_error_names_it():
    settings = EngineSettings(timeout_s=10.0, start_timeout_s=60.0)
    assert with_deadlines({"url": "u"}, settings) == {"url": "u", "silence_s": 9.0, "start_timeout_s": 30.0}
    assert with_deadlines({"silence_s": 3.0}, settings)["silence_s"] == 3.0


def test_a_wrong_token_is_named_with_its_variable_and_without_the_servers_options(server):
    server.RequestHandlerClass = HasAnotherToken
    with pytest.raises(TokenRefused, match="VECTORLM_SERVER_TOKEN") as caught:
        connect(server)
    assert "weight-transfer" not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    for call, argument in ((scorer(server).logprobs, ROWS), (scorer(server).parameter_sums, ())):
        with pytest.raises(TokenRefused, match="VECTORLM_TEACHER_TOKEN"):
            call(argument)


def test_vllm_is_imported_before_the_first_request(server, monkeypatch):
    made = []
    monkeypatch.setattr(server_backend, "make_sampling_params", made.append)
    with closing(connect(server)):
        assert made == [None]
