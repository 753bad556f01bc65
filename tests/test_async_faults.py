"""A part of a run dies while completions are in flight: the run ends cleanly, and can be resumed."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from rl_runs import config_of, lines, save_files
from watched_run import WatchedRun

EXAMPLE = Path(__file__).parents[1] / "examples" / "rl_example_mp.py"
NUM_STEPS = 10
START_S = 150
OVERRIDES = [
    "rl.async={max_staleness: 2, update: keep}",
    "rl.sampling_params={max_tokens: 40}",
    f"rl.max_steps={NUM_STEPS}",
]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "scratch").mkdir()
    return save_files(tmp_path / "files")


def start(files):
    config_of(files, files / "run")
    command = [str(EXAMPLE), "--yaml_path", str(files / "run.yaml"), "--world_size", "2"]
    command += [word for override in OVERRIDES for word in ("--set", override)]
    return WatchedRun(command, files.parent / "scratch")


def steps_of(files):
    path = files / "run" / "metrics.jsonl"
    rows = path.read_text().splitlines() if path.exists() else []
    return [json.loads(row)["step"] for row in rows if row.endswith("}")]


def wait_for_step(files, step, run):
    deadline = time.monotonic() + START_S
    while step not in steps_of(files):
        assert run.process.poll() is None, run.error()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_ends_cleanly_and_goes_on_from_its_checkpoint(files):
    run = start(files)
    wait_for_step(files, 3, run)
    for pid, command in run.processes():
        if "vectorlm.engine.process" in command:
            os.kill(pid, signal.SIGKILL)
    code, error = run.outcome(timeout_s=60)
    assert code != 0
    assert re.search(r"EngineDied: .*was ended by SIGKILL", error), error
    reached = max(steps_of(files))
    assert 3 <= reached < NUM_STEPS, "the run was over before anything had happened to it"
    again = start(files)
    code, error = again.outcome(timeout_s=START_S)
    assert code == 0, error
    assert "resuming" in error
    assert steps_of(files) == list(range(NUM_STEPS + 1))
    # Eight questions, four a step: each was trained on equally often, whatever was in flight.
    asked = [row["prompt"] for row in lines(files / "run" / "rollouts.jsonl")[::4]]
    assert sorted(asked) == sorted([letter * 3 for letter in "abcdefgh"] * (NUM_STEPS // 2))
