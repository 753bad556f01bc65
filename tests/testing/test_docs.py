"""The examples of docs/engines.md run as they are written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rank_processes import save_tiny_llama

from vectorlm.testing import CHECKS

DOCS = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
FAKE, PYTEST, RANKS = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    save_tiny_llama(tmp_path / "path/to/a/small/model", hidden_size=64)
    (tmp_path / "my_engines.py").write_text("from vectorlm.sampling.hf_engine import HFEngine as MyEngine\n")
    return tmp_path


def run(folder, *command):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_scripted_engine_says_its_script():
    exec(FAKE, {})


def test_an_engine_of_ones_own_goes_through_every_check(folder):
    (folder / "test_mine.py").write_text(PYTEST)
    assert f"{len(CHECKS)} passed" in run(folder, "-m", "pytest", "-p", "no:cacheprovider", "test_mine.py")
    assert f"{len(CHECKS)} of them" in DOCS


@pytest.mark.slow
def test_every_rank_may_run_the_checks(folder):
    (folder / "ranks.py").write_text(RANKS)
    run(folder, "ranks.py")
