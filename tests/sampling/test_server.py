"""A vLLM server in a separate process: scores, updates and sampling over HTTP on loopback."""

import contextlib
import json
import os
import socket
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from in_flight_cases import another, check_tokens_against_their_caches
from kit.open_ports import descendants, listening
from kit.rank_processes import save_tiny_llama
from kit.rl_runs import config_of, is_documented, lines, save_files
from server_process import LEAVES, TOKEN, running_server, status_of
from transformers import AutoModelForCausalLM

from vectorlm import SamplingEngine
from vectorlm.cli import main
from vectorlm.errors import ConfigError, EngineDied, EngineError, WeightMismatch
from vectorlm.runs.preflight.rl import check_teacher
from vectorlm.runs.reinforcement import reinforce
from vectorlm.sampling.backends.server.backend import VLLMServer
from vectorlm.sampling.backends.server.client import ScoringServer
from vectorlm.sampling.backends.server.extension import ServerExtension
from vectorlm.sampling.backends.server.serve import Guard, server_command, server_environment
from vectorlm.sampling.testing import EngineUnderTest, run_checks
from vectorlm.sampling.weights.exports import DeviceHandle
from vectorlm.sampling.weights.plan import Layout, Piece, Slot, TensorSpec
from vectorlm.sampling.weights.record import Copy, LoadPlan, View
from vectorlm.sampling.weights.wire import (
    DeviceExport,
    arguments_from_wire,
    result_from_wire,
    result_to_wire,
    to_wire,
)
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.packing import Rows
from vectorlm.transfer import WeightTransfer

ROWS = [[2, 3, 4, 5], [6, 7], [8, 9, 10]]
SERVER = ["--dtype", "float32", "--max-model-len", "1024"]
SERVER += ["--worker-extension-cls", "left_embeddings.ServerLeavesAnEmbedding"]


TINY_LLAMA = {"hidden_size": 64, "max_length": 1024}
pytestmark = pytest.mark.filterwarnings("ignore:another engine of this process is open")


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Return the path of a file; while it exists, each update of the server checks and leaves an embedding."""
    return tmp_path_factory.mktemp("left") / "updates"


@pytest.fixture(scope="module")
def server(folder, left, tmp_path_factory):
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            # Workers import the extension by its module's name.
            patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
            patch.setenv(LEAVES, str(left))
            running = stack.enter_context(running_server(folder, log_path, *SERVER))
        yield running


def engine_of(server, folder, topology=None, **arguments):
    arguments = {"token": TOKEN, "timeout_s": 120, **arguments}
    return SamplingEngine(str(folder), topology=topology, inference="server", url=server[1], **arguments)


@pytest.fixture(scope="module")
def engine(server, folder):
    with engine_of(server, folder) as engine:
        yield engine


@pytest.fixture
def teacher(server, monkeypatch):
    """Return the address of the server, with the token for scores; a scoring client sends no weights."""
    monkeypatch.setenv("VECTORLM_TEACHER_TOKEN", TOKEN)
    return server[1]


# This test runs while the server has the weights of `folder`.
@pytest.mark.slow
def test_a_server_scores_as_the_trainer_does(teacher, folder):
    found = ScoringServer(teacher).logprobs(ROWS)
    ids = torch.zeros(3, 4, dtype=torch.int64)
    for index, row in enumerate(ROWS):
        ids[index, : len(row)] = torch.tensor(row)
    attention = (torch.arange(4) < torch.tensor([[4], [2], [3]])).long()
    rows = Rows(ids, attention, attention.bool() & (torch.arange(4) > 0), (0, 1, 2))
    expected = LanguageModel(load_model(folder)).logprobs(rows)
    for index, row in enumerate(found):
        # Two float32 kernels round differently.
        torch.testing.assert_close(torch.tensor(row), expected[index, : len(row)].detach(), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_server_shows_the_most_probable_tokens(teacher, folder):
    model = load_model(folder)
    for row, places in zip(ROWS, ScoringServer(teacher).top_logprobs(ROWS, 5), strict=True):
        expected = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1).topk(5)
        assert [[token for token, _ in place] for place in places] == expected.indices.tolist()
        found = torch.tensor([[value for _, value in place] for place in places])
        torch.testing.assert_close(found, expected.values.detach(), atol=1e-4, rtol=0)
    with pytest.raises(EngineError, match="prompt_logprobs"):
        ScoringServer(teacher).top_logprobs(ROWS, 30)


def distilling(url, folder):
    return [f"model={folder}", f"rl.teacher={{server: '{url}'}}", "rl.rewards={}", "rl.group_size=2"]


@pytest.mark.slow
def test_a_server_with_another_tokenizer_or_no_room_is_refused(teacher, folder, tmp_path):
    files = save_files(tmp_path)
    config = config_of(files, tmp_path / "ok", "on_policy_distillation", distilling(teacher, folder))
    check_teacher(config)
    other = save_tiny_llama(tmp_path / "other", hidden_size=64)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["z"] = vocabulary["z"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    more = [*distilling(teacher, folder), f"model={other}"]
    with pytest.raises(ConfigError, match=r"rl\.teacher\.server"):
        check_teacher(config_of(files, tmp_path / "other_run", "on_policy_distillation", more))
    more = [
        *distilling(teacher, folder),
        "train_parameters.max_seq_len=1024",
        "rl.max_tokens_per_micro_batch=2048",
    ]
    with pytest.raises(ConfigError, match=r"rl\.teacher\.server.*1024"):
        check_teacher(config_of(files, tmp_path / "long", "on_policy_distillation", more))


@pytest.mark.slow
def test_a_run_learns_from_a_server(teacher, folder, tmp_path):
    """The student is another model with the same tokenizer; its divergence falls."""
    files = save_files(tmp_path)
    more = [*distilling(teacher, folder)[1:], "rl.max_steps=12", "train_parameters.optimizer.lr=3.0e-3"]
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


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_an_update_meets_requests_on_their_way(engine, folder, in_flight):
    report = check_tokens_against_their_caches(engine, folder, in_flight)
    assert 0 < report.load_s <= report.stall_s <= report.total_s


@pytest.mark.slow
def test_no_path_but_the_server_s_health_is_open_without_the_token(server):
    _, url = server
    paths = [
        "/pause",
        "/resume",
        "/collective_rpc",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/v1/completions",
        "/tokenize",
        "/nowhere",
    ]
    assert {path: status_of(url, path) for path in paths} == dict.fromkeys(paths, 401)
    assert {status_of(url, path, token="another token entirely") for path in paths} == {401}
    assert status_of(url, "/health", method="GET") == 200
    assert status_of(url, "/health") == 401
    assert status_of(url, "/is_paused", token=TOKEN, method="GET") == 200


@pytest.mark.slow
def test_a_server_listens_on_loopback_unless_it_is_told_otherwise(server):
    process, url = server
    found = listening(descendants(process.pid))
    assert {address for address, port in found if url.endswith(f":{port}")} == {"0100007F"}


@pytest.mark.slow
def test_a_wrong_token_is_named_before_anything_is_sampled(server, folder):
    with (
        engine_of(server, folder, token="not the token of this server") as engine,
        pytest.raises(EngineError, match="token"),
    ):
        engine.wait_until_ready()


@pytest.mark.slow
def test_it_is_told_whether_the_server_holds_a_checkpoint(
    server, engine, folder, tmp_path, monkeypatch, capsys
):
    wider = save_tiny_llama(tmp_path / "wider", hidden_size=128, max_length=1024)
    command = ["verify", server[1]]
    assert main([*command, str(folder)]) == 1
    assert "VECTORLM_SERVER_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("VECTORLM_SERVER_TOKEN", TOKEN)
    engine.update(AutoModelForCausalLM.from_pretrained(folder), engine.version + 1)
    assert main([*command, str(folder)]) == 0
    assert "proven by the checksums of all 30 tensors, which it holds in float32" in capsys.readouterr().out
    engine.update(another(folder, 2), engine.version + 1)
    assert main([*command, str(folder)]) == 1
    assert "30 of 30 tensors differ" in capsys.readouterr().err
    assert main([*command, str(wider)]) == 1
    assert "WeightMismatch: at http" in capsys.readouterr().err


@pytest.mark.slow
def test_a_prompt_that_the_server_refuses_ends_its_batch_alone(engine):
    fine = engine.submit([[2, 3]], {"max_tokens": 4, "ignore_eos": True})
    wrong = engine.submit([[2, 3], [2] * 2000], {"max_tokens": 4})
    with pytest.raises(
        EngineError, match=r"the server refused /inference/v1/generate: .*(1024|longer|maximum)"
    ):
        wrong.result()
    assert len(fine.result()[0][0].token_ids) == 4


@pytest.mark.slow
def test_other_clients_are_answered_through_an_update(engine, folder, server):
    _, url = server
    body = {
        "prompt": [2, 3, 4],
        "max_tokens": 300,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    asked = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
    )
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(lambda: json.load(urllib.request.urlopen(asked)))
        step = engine.version + 1
        while not answer.done():
            engine.update(another(folder, step), step)
            step += 1
    assert answer.result()["usage"]["completion_tokens"] == 300
    assert step > engine.version > 1


@pytest.mark.slow
def test_whoever_connects_last_owns_the_weights_that_the_first_has_left(engine, folder, server):
    step = engine.version + 1
    engine.update(another(folder, 9), step)
    greedy = {"temperature": 0, "max_tokens": 8, "logprobs": 0}
    (ours,) = engine.sample([[2, 3, 4]], greedy)[0]
    with engine_of(server, folder) as second:
        with pytest.warns(match="earlier trainer"):
            (theirs,) = second.sample([[2, 3, 4]], greedy)[0]
        assert theirs.token_ids == ours.token_ids
        assert theirs.sampler_logprobs == ours.sampler_logprobs
    with pytest.raises(EngineError, match=rf"versions -1, but the weights were, in this order, \[{step}\]"):
        engine.sample([[2, 3, 4]], greedy)
    with pytest.raises(EngineError, match="another trainer"):
        engine.update(another(folder, 8), step + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode='raw_logprobs'.*processed_logprobs"),
        ({"max_model_len": 1025}, "max_model_len=1025.*1024"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused(server, folder, needs, message):
    with engine_of(server, folder, **needs) as engine, pytest.raises(ConfigError, match=message):
        engine.wait_until_ready()


@pytest.mark.slow
def test_any_trainer_with_the_token_can_update_it(server, folder, monkeypatch):
    monkeypatch.delenv("VECTORLM_SERVER_TOKEN", raising=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(EngineError, match="token"):
        WeightTransfer(model, server[1])
    with WeightTransfer(model, server[1], token=TOKEN) as transfer:
        assert transfer.update(1).verified


@pytest.mark.slow
def test_the_engine_keeps_the_contract(server, folder, engine):
    engine.close()
    with engine_of(server, folder) as fresh:
        run_checks(EngineUnderTest(fresh, folder))


@pytest.mark.slow
def test_a_server_forgets_embeddings_of_images_at_each_update(server, left, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    left.touch()
    try:
        with engine_of(server, folder) as engine:
            for step in range(2):
                engine.update(model, step)
        assert left.read_text() == "left\n" * 2
    finally:
        left.unlink()


@pytest.mark.slow
def test_reinforcement_learning_samples_from_a_server(server, folder, tmp_path, monkeypatch):
    """Updates are in flight. For tokens of the newest weights, trainer and server agree on the probabilities."""
    monkeypatch.setenv("VECTORLM_SERVER_TOKEN", TOKEN)
    cores = os.sched_getaffinity(0)
    overrides = [
        f"model={folder}",
        f"engine={{inference: server, url: {server[1]}}}",
        "rl.async={max_staleness: 2, update: keep, placement: split}",
        "rl.sampling_params={max_tokens: 30, temperature: 0.7}",
        "rl.correction.preset=tis",
    ]
    reinforce(config_of(save_files(tmp_path), tmp_path / "run", overrides=overrides))
    assert os.sched_getaffinity(0) == cores, "the run must give back the cores that it kept off"
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4]
    assert metrics[1]["staleness/token_max"] == 0
    assert metrics[1]["correction/ratio_max"] == pytest.approx(1, abs=1e-3)
    assert metrics[1]["correction/ratio_min"] == pytest.approx(1, abs=1e-3)
    assert max(line["staleness/token_max"] for line in metrics[1:]) > 0


@pytest.mark.slow
def test_the_end_of_the_server_ends_requests_with_its_address_and_takes_its_engine_along(server, folder):
    """Before, engine core and worker kept running and kept the device's memory."""
    process, url = server
    with engine_of(server, folder) as engine:
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= 2, "engine core and worker"
        handle = engine.submit([[2, 3]], {"max_tokens": 1000, "ignore_eos": True})
        process.kill()
        process.wait()
        with pytest.raises(EngineDied, match=url):
            handle.result()
        with pytest.raises(EngineError, match="must be started again"):
            engine.sample([[2, 3]])
    _, alive = psutil.wait_procs(below, 20)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def test_a_server_that_does_not_come_is_named(folder):
    with pytest.raises(EngineDied):
        VLLMServer(str(folder), receiver="auto", url="http://127.0.0.1:9", token=TOKEN, start_timeout_s=0)


@pytest.mark.parametrize("url", ["http://192.0.2.1:8000", "http://example.org", "127.0.0.1:8000"])
def test_a_server_elsewhere_is_refused(folder, url):
    with pytest.raises(ConfigError, match="url="):
        VLLMServer(str(folder), receiver="auto", url=url, token=TOKEN)


@pytest.mark.parametrize("token", ["", "short"])
def test_a_guard_without_a_token_does_not_start(monkeypatch, token):
    monkeypatch.setenv("VECTORLM_SERVER_TOKEN", token)
    with pytest.raises(ConfigError, match="VECTORLM_SERVER_TOKEN"):
        Guard(None)
    with pytest.raises(ConfigError, match="VECTORLM_SERVER_TOKEN"):
        VLLMServer("model", receiver="auto", url="http://localhost:1")


def test_the_command_of_the_server_has_its_lock():
    command = server_command("model", "127.0.0.1", 8000, ["--dtype", "float32"])
    assert command[command.index("--middleware") + 1] == f"{Guard.__module__}.{Guard.__name__}"
    sums = f"{ServerExtension.__module__}.{ServerExtension.__name__}"
    assert command[command.index("--worker-extension-cls") + 1] == sums
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "vectorlm"}
    assert command[-2:] == ["--dtype", "float32"]
    environment = server_environment({"VLLM_LOGGING_LEVEL": "INFO", "VLLM_SERVER_DEV_MODE": "0"})
    assert environment["VLLM_LOGGING_LEVEL"] == "INFO"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"


SPECS = (TensorSpec("a", (2, 3), (Piece("b", (2,), (3,), 1),)), TensorSpec("c", ()))
LAYOUT = Layout("/proc/1/fd/2", 64, (Slot("a", (2, 3), "bfloat16", 0, 8), Slot("c", (), "float32", 16)), 12)
HANDLE = DeviceHandle("GPU-1", bytes(range(64)), 16, (2, 3), (3, 1), "bfloat16")
LOAD_PLAN = LoadPlan((Copy("a", View((2,), (1,), 0), "w", View((2,), (1,), 4)),), {"w": "float32"}, {"w": 8})


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("vectorlm_describe", ["base", SPECS]),
        ("vectorlm_attach", ["base", LAYOUT]),
        ("vectorlm_attach", ["base", LAYOUT, (DeviceExport("a", (3, 0), HANDLE),)]),
        ("vectorlm_load", ["base", 3, True]),
    ],
)
def test_arguments_cross_the_wire_unchanged(method, arguments):
    assert arguments_from_wire(method, [to_wire(argument) for argument in arguments]) == arguments


def test_results_cross_the_wire_unchanged():
    answer, error = result_from_wire("vectorlm_describe", result_to_wire((LOAD_PLAN, None)))
    assert (answer, error) == (LOAD_PLAN, None)
    sums = [2**64 - 1, 0]
    assert result_from_wire("vectorlm_load", result_to_wire((sums, None))) == (sums, None)
    answer, error = result_from_wire("vectorlm_load", result_to_wire((None, WeightMismatch("no"))))
    assert (answer, type(error), str(error)) == (None, WeightMismatch, "no")


def test_only_calls_of_the_channel_and_arenas_pass():
    with pytest.raises(EngineError, match="not a call"):
        arguments_from_wire("__init__", [])
    with pytest.raises(EngineError, match="cannot be read"):
        arguments_from_wire("vectorlm_load", ["base", "one", True])
    with pytest.raises(EngineError, match="cannot be read"):
        arguments_from_wire("vectorlm_load", ["base", 1, True, 2])
    with pytest.raises(EngineError, match="arena"):
        arguments_from_wire("vectorlm_attach", ["base", to_wire(Layout("/etc/passwd", 64, ()))])
    # A client could name any file.
    handles = ["base", to_wire(LAYOUT), [{"name": "a", "place": [0, 0], "handle": {"path": "/etc/passwd"}}]]
    with pytest.raises(EngineError, match="cannot be read"):
        arguments_from_wire("vectorlm_attach", handles)


def test_only_on_cpu_nothing_is_compiled(monkeypatch):
    assert server_environment({})["TORCHDYNAMO_DISABLE"] == "1"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    # On CUDA the compiler makes vLLM's graphs.
    assert "TORCHDYNAMO_DISABLE" not in server_environment({})


@pytest.mark.parametrize("port", ["taken", 70000, -1])
def test_a_port_that_nobody_can_listen_at_is_named_at_once(monkeypatch, capsys, port):
    monkeypatch.setenv("VECTORLM_SERVER_TOKEN", TOKEN)
    monkeypatch.setattr("os.execvpe", lambda *_: pytest.fail("vLLM would say so after seconds"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if port == "taken" else port
        assert main(["serve", "--model", "model", f"--port={port}"]) == 2
    assert f"--port={port}" in capsys.readouterr().err
