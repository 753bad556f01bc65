"""New weights while sequences are being written: what each token was sampled with, and from which cache."""

import math
import os
import time
from pathlib import Path

import pytest
import torch
from child_processes import sampler_pid
from in_flight_cases import LONG, OTHER, PROMPT, alone, another, check_tokens_against_their_caches

LAST_CORE = max(os.sched_getaffinity(0))


TINY_LLAMA = {"hidden_size": 64, "max_length": 1024}
ENGINE_ARGS = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20, "devices": [LAST_CORE]}


@pytest.mark.slow
def test_an_engine_keeps_to_the_cores_that_are_its_own(engine):
    engine.wait_until_ready()
    for thread in Path(f"/proc/{sampler_pid()}/task").iterdir():
        assert os.sched_getaffinity(int(thread.name)) == {LAST_CORE}
    assert len(os.sched_getaffinity(0)) > 1


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_tokens_are_of_the_weights_and_the_cache_that_their_version_says(engine, folder, in_flight):
    report = check_tokens_against_their_caches(engine, folder, in_flight)
    assert 0 < report.load_s <= report.stall_s <= report.total_s


def test_a_new_request_finds_no_blocks_of_old_weights(engine, folder):
    """Its prompt is that of a request which still runs on them."""
    old, new = another(folder, 3), another(folder, 4)
    step = engine.version + 1
    engine.update(old, step)
    handle = engine.submit([PROMPT], {**LONG, "n": 1, "seed": 0})
    time.sleep(0.2)
    engine.update(new, step + 1, in_flight="keep")
    ((late,),) = engine.sample([PROMPT], {**LONG, "n": 1, "seed": 1, "max_tokens": 8})
    assert not handle.done()
    torch.testing.assert_close(
        torch.tensor(late.sampler_logprobs, dtype=torch.float64), alone(new, late), rtol=0, atol=1e-5
    )
    handle.result()
    ((again,),) = engine.sample([PROMPT], {**LONG, "n": 1, "seed": 2, "max_tokens": 8})
    torch.testing.assert_close(
        torch.tensor(again.sampler_logprobs, dtype=torch.float64), alone(new, again), rtol=0, atol=1e-5
    )


def test_several_updates_leave_their_versions_in_order(engine, folder):
    models = [another(folder, seed) for seed in range(3)]
    for delay_s in (0.05, 0.1, 0.2, 0.4, 0.8):
        first = engine.version + 1
        engine.update(models[0], first)
        handle = engine.submit([PROMPT, OTHER], {**LONG, "seed": 5})
        for step, model in enumerate(models[1:] * 3, start=first + 1):
            time.sleep(delay_s)
            engine.update(model, step, in_flight="keep")
        completions = [completion for options in handle.result() for completion in options]
        for completion in completions:
            assert len(completion.versions) == 400
            assert list(completion.versions) == sorted(completion.versions)
            assert all(math.isfinite(each) for each in completion.sampler_logprobs)
        if all(len(set(completion.versions)) > 2 for completion in completions):
            return
    raise AssertionError("the updates never met the requests on their way")
