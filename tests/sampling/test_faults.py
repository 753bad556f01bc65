"""Faults in a part of a run: the error names the part, and nothing is left behind."""

import os
import re
import signal
from pathlib import Path

import pytest
from kit.watched_run import GONE_WITHIN_S, WatchedRun

SCRIPT = Path(__file__).with_name("fault_script.py")


TINY_LLAMA = {"hidden_size": 64}


class Run(WatchedRun):
    """The process of fault_script.py."""

    def __init__(self, folder, what, world_size, scratch):
        super().__init__([str(SCRIPT), str(folder), what, str(world_size)], scratch)

    def wait_until_sampling_works(self):
        line = self.process.stdout.readline()
        assert "sampling works" in line, self.error()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (
            "engine killed while training",
            r"rank 0 of 2 raised EngineDied: the sampler process .* was ended by SIGKILL",
        ),
        ("engine cannot start", r"EngineError: .*cannot be built: .*max_model_len"),
        ("rank 1 killed", r"rank 1 of 2 was ended by SIGKILL"),
    ],
)
def test_the_cause_is_reported_and_nothing_is_left(folder, tmp_path, what, expected):
    code, error = Run(folder, what, 2, tmp_path).outcome()
    assert code == 1
    assert re.search(expected, error), error
    assert error.count("Traceback (most recent call last)") <= 4, "a wall of tracebacks"


@pytest.mark.slow
def test_a_silent_engine_is_an_error_within_the_deadline(folder, tmp_path):
    code, error = Run(folder, "engine frozen", 2, tmp_path).outcome()
    assert code == 1
    assert re.search(r"EngineTimeout: the sampler process .* sent nothing for 6 s while generating", error), (
        error
    )


@pytest.mark.slow
def test_an_interrupt_ends_everything(folder, tmp_path):
    run = Run(folder, "wait", 2, tmp_path)
    run.wait_until_sampling_works()
    os.killpg(run.process.pid, signal.SIGINT)
    code, error = run.outcome(timeout_s=GONE_WITHIN_S)
    assert code != 0
    assert "sampler process" not in error
    assert error.count("Traceback (most recent call last)") <= 1, error


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [0, 2], ids=["no launcher", "two ranks"])
def test_a_script_killed_outright_takes_everything_with_it(folder, tmp_path, world_size):
    run = Run(folder, "wait", world_size, tmp_path)
    run.wait_until_sampling_works()
    run.process.kill()
    run.outcome(timeout_s=GONE_WITHIN_S)
