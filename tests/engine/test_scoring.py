"""A server that scores tokens for distillation: what is asked of it, and what its failures are called."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from rank_processes import save_tiny_llama
from rl_runs import config_of, is_documented, lines, save_files
from server_process import TOKEN, running_server

from vectorlm.backends.server.scoring import ROWS_PER_REQUEST, ScoringServer
from vectorlm.errors import ConfigError, EngineDied, EngineError, EngineTimeout
from vectorlm.preflight.teacher import check_teacher
from vectorlm.rl_run import reinforce
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.packing import Rows

ROWS = [[2, 3, 4, 5], [6, 7], [8, 9, 10]]
TINY_LLAMA = {"hidden_size": 64, "max_length": 1024}


class Answers(BaseHTTPRequestHandler):
    """Scores each token by its place in its row, negated, but for what a test has put in `server.odd`."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body, self.headers.get("Authorization")))
        choices = [
            {"index": index, "prompt_logprobs": self.scores(row)} for index, row in enumerate(body["prompt"])
        ]
        text = self.server.odd or json.dumps({"choices": choices[::-1]})
        if text == "silence":
            time.sleep(5)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def scores(self, row):
        factor = self.server.factor
        return [None, *({str(token): {"logprob": -factor * place}} for place, token in enumerate(row[1:], 1))]

    def log_message(self, *args):
        """Stay silent."""


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads, server.odd, server.asked, server.factor = True, None, [], 1
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def connect(server, timeout_s=10.0):
    return ScoringServer(f"http://127.0.0.1:{server.server_address[1]}/", timeout_s)


def test_rows_are_asked_for_in_parts_and_come_back_in_their_order(server, monkeypatch):
    monkeypatch.setenv("VECTORLM_TEACHER_TOKEN", "a secret")
    rows = [[7] * (2 + index % 3) for index in range(2 * ROWS_PER_REQUEST + 5)]
    assert connect(server).logprobs(rows) == [[0.0, *(-float(n) for n in range(1, len(row)))] for row in rows]
    assert sorted(len(body["prompt"]) for body, _ in server.asked) == [5, ROWS_PER_REQUEST, ROWS_PER_REQUEST]
    assert {token for _, token in server.asked} == {"Bearer a secret"}
    assert connect(server).logprobs([]) == []


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
def test_nonsense_is_an_error_with_what_was_said(server, odd):
    server.odd = odd
    with pytest.raises(EngineError, match="no answer of a vLLM server") as caught:
        connect(server).logprobs(ROWS)
    assert odd[:20] in str(caught.value)


def test_silence_ends_at_the_deadline(server):
    server.odd = "silence"
    with pytest.raises(EngineTimeout, match=r"said nothing to /v1/completions for 0.5 s"):
        connect(server, 0.5).logprobs(ROWS)


def test_logits_are_told_from_log_probabilities(server):
    server.factor = -1
    with pytest.raises(ConfigError, match="gives the token 5 a log-probability of 3, and none is above 0"):
        connect(server).logprobs(ROWS)


def test_nobody_there_is_an_error_with_the_address():
    with pytest.raises(EngineDied, match=r"the server at http://127.0.0.1:9 does not answer"):
        ScoringServer("http://127.0.0.1:9").logprobs(ROWS)


@pytest.fixture(scope="module")
def running(folder, tmp_path_factory):
    """A real server, with the model of `folder`."""
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with (
        pytest.MonkeyPatch.context() as patch,
        running_server(folder, log_path, "--dtype", "float32", "--max-model-len", "65") as (_, url),
    ):
        patch.setenv("VECTORLM_TEACHER_TOKEN", TOKEN)
        yield url


@pytest.mark.slow
def test_a_server_scores_as_the_trainer_does(running, folder):
    found = ScoringServer(running).logprobs(ROWS)
    ids = torch.zeros(3, 4, dtype=torch.int64)
    for index, row in enumerate(ROWS):
        ids[index, : len(row)] = torch.tensor(row)
    attention = (torch.arange(4) < torch.tensor([[4], [2], [3]])).long()
    rows = Rows(ids, attention, attention.bool() & (torch.arange(4) > 0), (0, 1, 2))
    expected = LanguageModel(load_model(folder)).logprobs(rows)
    for index, row in enumerate(found):
        # Two kernels in float32.
        torch.testing.assert_close(torch.tensor(row), expected[index, : len(row)].detach(), atol=1e-4, rtol=0)


def overrides(url, folder):
    return [
        f"model={folder}",
        f"rl.teacher={{server: '{url}'}}",
        "rl.rewards={}",
        "rl.group_size=2",
    ]


@pytest.mark.slow
def test_a_server_with_another_tokenizer_or_no_room_is_refused(running, folder, tmp_path):
    files = save_files(tmp_path)
    config = config_of(files, tmp_path / "ok", "on_policy_distillation", overrides(running, folder))
    check_teacher(config)
    other = save_tiny_llama(tmp_path / "other", hidden_size=64)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["z"] = vocabulary["z"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    more = [*overrides(running, folder), f"model={other}"]
    with pytest.raises(
        ConfigError, match=r"has another tokenizer than the policy: in the text of all tokens"
    ):
        check_teacher(config_of(files, tmp_path / "other_run", "on_policy_distillation", more))
    more = [
        *overrides(running, folder),
        "train_parameters.max_seq_len=65",
        "rl.max_tokens_per_micro_batch=130",
    ]
    with pytest.raises(ConfigError, match="has room for 65 tokens, and must have room for one more"):
        check_teacher(config_of(files, tmp_path / "long", "on_policy_distillation", more))


@pytest.mark.slow
def test_a_run_learns_from_a_server(running, folder, tmp_path):
    """Its student is another model of the same tokenizer, and comes nearer."""
    files = save_files(tmp_path)
    more = [*overrides(running, folder)[1:], "rl.max_steps=12", "train_parameters.optimizer.lr=3.0e-3"]
    torch.manual_seed(5)
    student = load_model(files / "model")
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    student.save_pretrained(files / "model")
    reinforce(config_of(files, tmp_path / "run", "on_policy_distillation", more))
    metrics = lines(tmp_path / "run" / "metrics.jsonl")[1:]
    assert [name for line in metrics for name in line if name != "step" and not is_documented(name)] == []
    divergences = [line["teacher/kl"] for line in metrics]
    assert sum(divergences[-3:]) < 0.7 * sum(divergences[:3])
