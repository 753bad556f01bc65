"""The examples of docs/engines.md and docs/contracts.md run as they are written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rank_processes import save_tiny_llama

from vectorlm.cli import build_parser
from vectorlm.testing import CHECKS

PAGES = Path(__file__).parents[2] / "docs"
DOCS = (PAGES / "engines.md").read_text()
CONTRACTS = (PAGES / "contracts.md").read_text()


def blocks(text, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


FAKE, PYTEST, RANKS = blocks(DOCS)
NAMED, INFERENCE, FOLLOWED, TRAINER = blocks(CONTRACTS)


@pytest.fixture
def folder(tmp_path):
    save_tiny_llama(tmp_path / "path/to/a/small/model", hidden_size=64)
    (tmp_path / "my_engines.py").write_text(
        "from vectorlm.backends.transformers import HFEngine as MyEngine\n"
    )
    mine = "from vectorlm.backends.transformers.backend import Transformers as MyInference\n"
    (tmp_path / "my_inference.py").write_text(mine)
    return tmp_path


def run(folder, *command):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_scripted_engine_says_its_script():
    exec(FAKE, {})


@pytest.mark.slow
def test_an_engine_of_ones_own_goes_through_every_check(folder):
    (folder / "test_mine.py").write_text(PYTEST)
    assert f"{len(CHECKS)} passed" in run(folder, "-m", "pytest", "-p", "no:cacheprovider", "test_mine.py")
    assert f"{len(CHECKS)} of them" in DOCS


@pytest.mark.slow
def test_every_rank_may_run_the_checks(folder):
    (folder / "ranks.py").write_text(RANKS)
    run(folder, "ranks.py")


@pytest.mark.slow
def test_an_inference_of_ones_own_goes_through_every_check(folder):
    assert "my_inference.py:MyInference" in NAMED
    (folder / "test_mine.py").write_text(INFERENCE)
    assert f"{len(CHECKS)} passed" in run(folder, "-m", "pytest", "-p", "no:cacheprovider", "test_mine.py")


@pytest.mark.slow
def test_an_engine_follows_the_trainer_of_the_page(folder):
    (folder / "followed.py").write_text(FOLLOWED)
    assert len(run(folder, "followed.py").splitlines()) == 3


def test_the_checks_of_trainers_are_called_as_they_are_written():
    defined = {}
    exec(TRAINER, defined)
    assert callable(defined["keep_the_contract"])


def test_the_commands_of_the_server_parse():
    (line,) = (line for line in blocks(CONTRACTS, "bash")[0].splitlines() if line.startswith("vectorlm"))
    args = build_parser().parse_args(shlex.split(line)[1:])
    assert args.vllm_args == ["--max-model-len", "256"]
