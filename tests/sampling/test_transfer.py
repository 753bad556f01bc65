"""Weights for vLLM's server and for a `vllm.LLM`, from a trainer that uses nothing else of this library."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from kit.rank_processes import on_ranks, save_tiny_llama
from peft import LoraConfig, get_peft_model
from server_process import plain_server, status_of
from transfer_script import sharded_here
from transformers import AutoModelForCausalLM

from vectorlm import UpdateReport
from vectorlm.errors import (
    ChecksumMismatch,
    ConfigError,
    EngineDied,
    EngineError,
    LaunchError,
    NonFiniteWeights,
    WeightMismatch,
)
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.backends.served import ServedWeights
from vectorlm.sampling.backends.server.client import ScoringServer
from vectorlm.sampling.backends.vllm import plugin
from vectorlm.sampling.transport import Push
from vectorlm.sampling.weights.wire import Answers, append_answer
from vectorlm.transfer import WeightTransfer

TINY_LLAMA = {"hidden_size": 64, "max_length": 1024}
SERVER = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
SERVER += ["--kv-cache-memory-bytes", "100000000"]
ROWS = [[2, 3, 4, 5, 9, 11, 17], [6, 7, 30], list(range(8, 40))]
SCRIPT = Path(__file__).with_name("transfer_script.py")
ANSWERED_WITHIN_S = 20
SILENT_S = 2


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with plain_server(folder, tmp_path_factory.mktemp("server") / "log", *SERVER) as running:
        yield running


@pytest.fixture(scope="module")
def url(server):
    return server[1]


def moved(folder, seed):
    """Return the model of `folder` with noise that depends on the seed."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def require_held(url, model):
    """Check that the server's log-probabilities are the model's."""
    for row, found in zip(ROWS, ScoringServer(url).logprobs(ROWS), strict=True):
        logprobs = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(row)[1:, None])[:, 0]
        # Two float32 kernels round differently.
        torch.testing.assert_close(torch.tensor(found[1:]), expected, atol=1e-4, rtol=0)


def version_of(url):
    with urllib.request.urlopen(f"{url}/weight_info") as answer:
        return json.load(answer)["weight_version"]


@contextmanager
def asking(url):
    """Send a request in another thread; yield a function that returns whether it is answered within some seconds."""
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(lambda: ScoringServer(url, timeout_s=60).logprobs(ROWS[:1]))

        def is_answered(within_s):
            try:
                return bool(answer.result(within_s))
            except TimeoutError:
                return False

        yield is_answered


@pytest.mark.slow
def test_an_update_sends_what_the_model_holds_at_that_moment(url, folder):
    model = moved(folder, 1)
    with WeightTransfer(model, url) as transfer:
        for step in (3, 4):
            with torch.no_grad():
                model.lm_head.weight.mul_(1.5)
            report = transfer.update(step)
            assert isinstance(report, UpdateReport)
            assert (report.verified, report.skipped, report.version) == (True, False, step)
            assert report.num_bytes == sum(parameter.nbytes for parameter in model.parameters())
            assert 0 < report.load_s < report.total_s
            assert version_of(url) == str(step)
            require_held(url, model)
        # An update under the same step sends the weights too, without a warning.
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        assert not transfer.update(4).skipped
        require_held(url, model)


@pytest.mark.slow
def test_adapters_arrive_merged_and_the_trainer_keeps_its_bits(url, folder):
    model = get_peft_model(moved(folder, 2), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with WeightTransfer(model, url) as transfer:
        transfer.update(5)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    require_held(url, model)


@pytest.mark.slow
def test_a_refused_update_changes_neither_weights_nor_version(url, folder, tmp_path):
    model = moved(folder, 3)
    wider = AutoModelForCausalLM.from_pretrained(
        save_tiny_llama(tmp_path / "wider", **{**TINY_LLAMA, "hidden_size": 128}), dtype=torch.float32
    )
    shorter = moved(folder, 4)
    del shorter.model.layers[2]
    with WeightTransfer(model, url) as transfer:
        transfer.update(6)
        for other, name in ((wider, r"model\.\w+"), (shorter, r"layers\.2\.")):
            with WeightTransfer(other, url) as refused, pytest.raises(WeightMismatch, match=name):
                refused.update(7)
            assert version_of(url) == "6"
            require_held(url, model)
        weight = model.model.layers[1].mlp.up_proj.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[3, 4] = float("nan")
        with pytest.raises(NonFiniteWeights, match=r"layers\.1\.mlp\.up_proj"):
            transfer.update(7)
        with torch.no_grad():
            weight.copy_(kept)
        assert version_of(url) == "6"
        require_held(url, model)
        # A trainer whose update was refused has not taken over the weights.
        transfer.update(8)
        assert version_of(url) == "8"


@pytest.mark.slow
def test_after_a_wrong_byte_no_request_is_answered_until_the_next_good_update(url, folder, monkeypatch):
    model, publish = moved(folder, 5), Push.publish

    def publish_and_spoil(push, weight_set, layout, with_checksums):
        sums = publish(push, weight_set, layout, with_checksums)
        places = push._arenas.slots_of(layout)
        places["model.layers.1.self_attn.k_proj.weight"].view(torch.uint8)[5, 7] ^= 1
        return sums

    with WeightTransfer(model, url) as transfer:
        transfer.update(9)
        for _ in range(2):
            monkeypatch.setattr(Push, "publish", publish_and_spoil)
            with pytest.raises(ChecksumMismatch, match=r"layers\.1\.self_attn\.k_proj"):
                transfer.update(10)
            assert version_of(url) == "9"
            with asking(url) as is_answered:
                assert not is_answered(SILENT_S)
                monkeypatch.undo()
                transfer.update(11)
                assert is_answered(ANSWERED_WITHIN_S)
            require_held(url, model)
            transfer.update(9)


@pytest.mark.slow
def test_after_a_trainer_that_died_in_an_update_the_next_one_takes_over(url, folder):
    died = subprocess.run([sys.executable, SCRIPT, "dies", folder, url], capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert json.loads(died.stdout) == [], "it had names in /dev/shm, which nobody removes"
    model = moved(folder, 6)
    with asking(url) as is_answered:
        assert not is_answered(SILENT_S)
        assert status_of(url, "/health", method="GET") == 200
        with WeightTransfer(model, url) as transfer:
            transfer.update(12)
            assert is_answered(ANSWERED_WITHIN_S)
            assert version_of(url) == "12"
            require_held(url, model)


@pytest.mark.slow
def test_whoever_updates_last_owns_the_weights(url, folder):
    first, second = moved(folder, 7), moved(folder, 8)
    with WeightTransfer(first, url) as former:
        former.update(13)
        with WeightTransfer(second, url) as latter:
            former.update(14)
            latter.update(15)
            with pytest.raises(EngineError, match="another trainer"):
                former.update(16)
            require_held(url, second)
            assert version_of(url) == "15"
            former.close()
            latter.update(17)
    require_held(url, second)
    with WeightTransfer(first, url) as third:
        third.update(18)
        # The new arena replaces the earlier ones, and the server computes with it in place.
        assert third._swap._layouts["base"].num_copied_bytes == 0
    require_held(url, first)


@pytest.mark.slow
def test_every_update_empties_the_prefix_cache_also_under_requests(url, folder):
    """The requests share a prefix of whole blocks with requests before the update."""
    row = [2 + place % 40 for place in range(200)]
    model = moved(folder, 9)
    body = {"prompt": row, "max_tokens": 50, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with WeightTransfer(model, url) as transfer, ThreadPoolExecutor() as pool:
        transfer.update(19)
        running = pool.submit(lambda: json.load(urllib.request.urlopen(request)))
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        transfer.update(20)
        body = {"prompt": row, "max_tokens": 1, "logprobs": 1, "temperature": 0}
        answer = json.load(
            urllib.request.urlopen(
                urllib.request.Request(request.full_url, json.dumps(body).encode(), dict(request.headers))
            )
        )
        with torch.no_grad():
            expected = model(torch.tensor([row])).logits[0, -1].log_softmax(-1).max().item()
        assert answer["choices"][0]["logprobs"]["token_logprobs"][0] == pytest.approx(expected, abs=1e-4)
        assert running.result()["usage"]["completion_tokens"] == 50


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "processes"])
def test_sharded_ranks_of_any_launcher_send_one_model(url, folder, launcher):
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
        command = [*torchrun, SCRIPT, launcher, folder, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        # These ranks have a process group, but no launcher's variables.
        printed = "".join(on_ranks(2, sharded_here, folder, url))
    assert printed.count("verified=True") == 4, "two updates on two ranks"
    assert version_of(url) == "21"
    assert "NonFiniteWeights on both" in printed


@pytest.mark.slow
def test_the_end_of_the_server_is_an_error_in_time_and_leaves_nothing(server, folder):
    process, url = server
    below = psutil.Process(process.pid).children(recursive=True)
    with WeightTransfer(moved(folder, 10), url) as transfer:
        transfer.update(30)
        killed = threading.Timer(0.5, process.kill)
        killed.start()
        start = time.monotonic()
        with pytest.raises(EngineDied, match=url):
            list(map(transfer.update, itertools.count(31)))
        assert time.monotonic() - start < 60
        killed.join()
    process.wait()
    _, alive = psutil.wait_procs(below, 20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_an_llm_in_the_trainers_process_is_updated(folder, size):
    # vLLM would compile the function that ranks a token; it is no part of an update.
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "llm", folder, size],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["verified"]
    assert found["distance"] < 1e-4
    assert found["after a wrong byte"].startswith("EngineError: the engine's weights are not proven")
    assert found["distance after the next update"] < 1e-4
    assert found["version"] == "3"


def test_a_worker_writes_only_into_the_file_of_a_trainer(tmp_path):
    answers = Answers()
    append_answer(answers.path, 1, ([1, 2], None))
    append_answer(answers.path, 2, (None, WeightMismatch("no")))
    assert answers.read(2) == [{"error": "WeightMismatch", "text": "no"}]
    assert answers.read(1) == [], "late answers to earlier calls are gone"
    with (tmp_path / "other").open("w") as file:
        for path in (str(tmp_path / "other"), f"/proc/{os.getpid()}/fd/{file.fileno()}", "/proc/1/fd/999"):
            with pytest.raises(EngineError, match="one machine"):
                append_answer(path, 1, (None, None))
    answers.close()


def test_a_place_among_ranks_is_that_of_the_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Topology.of_process_group("cpu") == Topology()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="init_process_group"):
        Topology.of_process_group("cpu")


def connect_in_vain(topology):
    with pytest.raises(EngineDied) as caught:
        WeightTransfer(torch.nn.Linear(2, 2), "http://127.0.0.1:9", timeout_s=1, start_timeout_s=4)
    return str(caught.value)


@pytest.mark.slow
def test_every_rank_waits_for_a_starting_server_for_longer_than_for_a_silent_rank():
    for text in on_ranks(2, connect_in_vain):
        assert "127.0.0.1:9 does not answer" in text


def test_wrong_input_is_told_before_anything_is_sent(folder):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="url="):
        WeightTransfer(model, "http://192.0.2.1:8000")
    with pytest.raises(EngineDied):
        WeightTransfer(model, "http://127.0.0.1:9", start_timeout_s=0)
    with pytest.raises(TypeError, match="model="):
        WeightTransfer("model", "http://127.0.0.1:9")
    for name, value in (("receiver", "pack"), ("transport", "pul")):
        with pytest.raises(ValueError, match=f"{name}='{value}'"):
            WeightTransfer(model, "http://127.0.0.1:9", start_timeout_s=0, **{name: value})


def test_the_entry_point_imports_nothing_until_an_engine_uses_the_backend():
    # vLLM calls the entry point in every process, with any backend.
    code = "import sys, vectorlm.sampling.backends.vllm.plugin; print({'torch', 'vllm', 'msgspec'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
    setup = Path(__file__).parents[2] / "setup.py"
    assert f"vectorlm={plugin.__name__}:{plugin.register.__name__}" in setup.read_text()


@pytest.mark.parametrize(
    ("backend", "worker", "expected"),
    [
        ("vectorlm", plugin.CPU_WORKER, plugin.OUR_CPU_WORKER),
        ("nccl", plugin.CPU_WORKER, plugin.CPU_WORKER),
        (None, plugin.CPU_WORKER, plugin.CPU_WORKER),
        ("vectorlm", "a.users.Worker", "a.users.Worker"),
    ],
)
def test_only_workers_of_the_backend_are_adapted(backend, worker, expected):
    class Platform:
        @classmethod
        def check_and_update_config(cls, config):
            config.parallel_config.worker_cls = worker

    plugin._adapt_workers(Platform)
    transfer = None if backend is None else SimpleNamespace(backend=backend)
    config = SimpleNamespace(
        weight_transfer_config=transfer, parallel_config=SimpleNamespace(worker_cls="auto")
    )
    Platform.check_and_update_config(config)
    assert config.parallel_config.worker_cls == expected


class Engine:
    """A stand-in for vLLM's worker, with its rules for updates that have started."""

    def __init__(self, is_active, is_whole):
        self.is_active, self.is_whole, self.made = is_active, is_whole, []

    def route(self, name, body):
        self.made.append(name)
        if name == "start_weight_update" and self.is_active:
            raise EngineError("start_weight_update called while a weight update is already active")
        if name == "finish_weight_update":
            assert self.is_active
            self.is_active = False
        if name == "init_weight_transfer_engine":
            call = body["init_info"]
            settings = {"is_whole": self.is_whole, "device": "cuda", "max_num_seqs": 3}
            answers = {"vectorlm_settings": settings, "vectorlm_begin": self.is_active}
            answer = (answers | {"vectorlm_prepare": "live"}).get(call["method"])
            append_answer(call["answers"], call["number"], (answer, None))


def test_an_update_that_another_trainer_has_begun_is_ended_first():
    engine = Engine(is_active=True, is_whole=False)
    weights = ServedWeights(engine.route, "auto")
    assert weights.transports == ("push", "bucketed", "pull")
    weights.resume()
    assert "resume" not in engine.made, "nobody knows what it holds"
    weights.pause()
    assert engine.made[-3:] == ["pause", "finish_weight_update", "start_weight_update"]


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_engine_that_takes_no_update_goes_on_if_its_weights_are_whole(is_whole):
    engine = Engine(is_active=False, is_whole=is_whole)

    def refuse(name, body):
        engine.route(name, body)
        if name == "start_weight_update":
            raise EngineError("no")

    weights = ServedWeights(refuse, "auto")
    with pytest.raises(EngineError, match="no"):
        weights.pause()
    assert ("resume" in engine.made) == is_whole
