"""Runs without the optional packages."""

import json
import os
import subprocess
import sys

import pytest
from kit.rank_processes import save_tiny_llama
from kit.rl_runs import config_of, save_files
from kit.sft_runs import make_config

from vectorlm.cli import main

HIDING = """
import sys
from importlib.machinery import PathFinder

class Hiding:
    invalidate_caches, find_distributions = PathFinder.invalidate_caches, PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        hidden = name.partition(".")[0] in {names!r}
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


def hide(*names):
    """Hide packages from this process, as if they were not installed."""
    exec(HIDING.format(names=names), {})


@pytest.fixture
def hidden(monkeypatch):
    """Return a function that hides packages, by name, during the test."""

    def hide_for_now(*names):
        for name in names:
            monkeypatch.delitem(sys.modules, name, raising=False)
        hide(*names)

    before = list(sys.meta_path)
    yield hide_for_now
    sys.meta_path[:] = before


def test_the_check_refuses_what_needs_a_package_and_says_that_there_will_be_no_pictures(
    inputs, tmp_path, hidden, capsys
):
    make_config(inputs, tmp_path / "run")
    command = ["check", str(tmp_path / "run.yaml")]
    assert main(command) == 0
    assert "matplotlib" not in capsys.readouterr().out
    hidden("matplotlib", "wandb")
    assert main(command) == 0
    assert "matplotlib" in capsys.readouterr().out
    assert main([*command, "--set", "enable_wandb_logging=true"]) == 2
    assert "enable_wandb_logging" in capsys.readouterr().err


FINE_TUNING = """
from vectorlm.runs.config.load import load_config
from vectorlm.runs.fine_tuning import finetune

finetune(load_config(sys.argv[1], sys.argv[2:]))
print(sorted({"matplotlib", "wandb"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_fine_tuning_without_matplotlib_leaves_everything_but_pictures(inputs, tmp_path):
    make_config(inputs, tmp_path / "run", epochs=1)
    done = run_without(("matplotlib", "wandb"), FINE_TUNING, str(tmp_path / "run.yaml"))
    assert done.stdout == "[]\n"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.yaml",
        "final-model",
        "metrics.jsonl",
        "run.json",
    ]
    # The note comes at the start of the run.
    assert done.stderr.index("matplotlib") < done.stderr.index("step ")


def run_without(names, code, *arguments):
    """Run code in a new process that lacks these packages."""
    command = [sys.executable, "-c", HIDING.format(names=names) + code, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


RL = """
from vectorlm import FakeEngine
from vectorlm.runs.config.load import load_config
from vectorlm.runs.reinforcement import reinforce

config = load_config(sys.argv[1], sys.argv[2:])
with FakeEngine(lambda prompt, version: "aeiou") as engine:
    reinforce(config, engine=engine)
"""


@pytest.mark.slow
def test_reinforcement_learning_without_datasets_goes_on(tmp_path):
    config_of(save_files(tmp_path), tmp_path / "run")
    # A FakeEngine's tokens are characters.
    save_tiny_llama(tmp_path / "model", vocab_size=128)
    absent = ("datasets", "matplotlib", "wandb")
    done = run_without(absent, RL, str(tmp_path / "run.yaml"), "rl.max_steps=1")
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").open()] == [0, 1]
    assert "matplotlib" in done.stderr
