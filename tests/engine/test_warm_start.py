"""Engines that are forked from a process which has vLLM loaded: the same engines, and the same ends."""

import copy
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from child_processes import children
from swap_cases import GREEDY, compare, perturb
from tiny_engine import TINY_ENGINE
from transformers import AutoModelForCausalLM

from vectorlm import SamplingEngine, WarmStart
from vectorlm.errors import EngineDied, EngineError

TINY_LLAMA = {"tied": True, "hidden_size": 64}


@pytest.fixture(scope="module")
def warm():
    with WarmStart() as warm:
        yield warm


def forked(warm):
    return children(warm._process.pid, "vectorlm.engine.process")


def until_gone(pid):
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.05)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_an_engine_is_the_one_that_starts_by_itself(warm, folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    log = tmp_path / "log"
    with SamplingEngine(folder, warm_start=warm, log_path=log, **TINY_ENGINE) as engine:
        equal, gap, _ = compare(engine, model)
        assert all(equal)
        assert gap < 1e-4
        (pid,) = forked(warm)
        assert engine._channel.pid == pid
        perturb(model, copy.deepcopy(model), seed=1)
        engine.update(model, 1)
        equal, gap, _ = compare(engine, model)
        assert all(equal)
        assert gap < 1e-4
    until_gone(pid)
    assert forked(warm) == []
    assert log.exists()


def test_two_live_beside_each_other_and_one_ends_alone(warm, folder):
    with SamplingEngine(folder, warm_start=warm, **TINY_ENGINE) as one:
        with SamplingEngine(folder, warm_start=warm, **TINY_ENGINE) as other:
            assert one.sample([[2, 3]], GREEDY) == other.sample([[2, 3]], GREEDY)
            os.kill(other._channel.pid, signal.SIGKILL)
            with pytest.raises(EngineDied, match="was ended by SIGKILL"):
                other.sample([[2, 3]], GREEDY)
        assert len(one.sample([[2, 3]], GREEDY)) == 1


def test_what_fails_at_the_start_is_told(warm, folder):
    with (
        SamplingEngine(folder, warm_start=warm, no_such_argument=1) as engine,
        pytest.raises(EngineError, match="knows no argument 'no_such_argument'"),
    ):
        engine.wait_until_ready()
    with pytest.raises(ValueError, match="warm_start has loaded 'vllm'"):
        SamplingEngine(folder, warm_start=warm, inference="transformers")


def test_engines_end_with_the_process_that_they_were_forked_from(folder):
    with WarmStart() as warm:
        engine = SamplingEngine(folder, warm_start=warm, **TINY_ENGINE)
        assert len(engine.sample([[2, 3]], GREEDY)) == 1
        pid = engine._channel.pid
        warm._process.kill()
        until_gone(pid)
        with pytest.raises(EngineDied):
            engine.sample([[2, 3]], GREEDY)
        engine.close()
        with pytest.raises(EngineError, match="make another WarmStart"):
            SamplingEngine(folder, warm_start=warm, **TINY_ENGINE)
