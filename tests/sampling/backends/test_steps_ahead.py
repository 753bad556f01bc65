"""Sleeping and waiting on vLLM's own scheduler, with and without steps scheduled ahead as on CUDA."""

import pytest
from idle_executor import TOKEN, VARIABLES, idle_engine

from vectorlm.errors import EngineError
from vectorlm.sampling.backends.vllm.shim import CudaSleep, finish_steps, make_sampling_params
from vectorlm.sampling.sampler.scheduler import SleepState

KV_CACHE, BOTH = frozenset({"kv_cache"}), frozenset({"weights", "kv_cache"})


@pytest.fixture(
    scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["ahead", "one by one"]
)
def engine(request, folder):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        yield idle_engine(str(folder), steps_ahead=request.param)


def submit(engine, name, num_tokens):
    params = {"max_tokens": num_tokens, "ignore_eos": True, "detokenize": False}
    engine.add_request(name, {"prompt_token_ids": [2, 3, 4]}, make_sampling_params(params))


def run(engine):
    found = []
    while engine.has_unfinished_requests():
        found += engine.step()
    return found


def steps(engine, count):
    for _ in range(count):
        engine.step()


def nothing(engine): ...


def finished(engine):
    submit(engine, "a", 3)
    submit(engine, "b", 1)
    run(engine)


def cancelled_before_its_first_step(engine):
    submit(engine, "a", 3)
    engine.abort_request(["a"])


def cancelled_while_it_ran(engine):
    submit(engine, "a", 50)
    steps(engine, 5)
    engine.abort_request(["a"])


def cancelled_after_an_update_that_kept_it(engine):
    submit(engine, "a", 50)
    steps(engine, 5)
    finish_steps(engine)
    engine.abort_request(["a"])


STORIES = [
    nothing,
    finished,
    cancelled_before_its_first_step,
    cancelled_while_it_ran,
    cancelled_after_an_update_that_kept_it,
]


@pytest.mark.parametrize("parts", [KV_CACHE, BOTH], ids=len)
@pytest.mark.parametrize("story", STORIES)
def test_an_engine_without_requests_sleeps_whatever_became_of_them(engine, story, parts):
    executor = engine.engine_core.engine_core.model_executor
    bed = CudaSleep(engine)
    rest = SleepState(bed.sleep, bed.wake_up)
    story(engine)
    finish_steps(engine)
    rest.sleep(parts, 0)
    assert executor.mapped == BOTH - parts
    rest.wake_up(BOTH)
    submit(engine, "later", 4)
    (output,) = run(engine)
    assert output.outputs[0].token_ids == [TOKEN] * 4


def test_a_cache_that_vllm_keeps_leaves_the_engine_awake(engine):
    bed = CudaSleep(engine)
    rest = SleepState(bed.sleep, bed.wake_up)
    cancelled_before_its_first_step(engine)
    with pytest.raises(EngineError, match="release_kv_cache_memory"):
        rest.sleep(KV_CACHE, 0)
    rest.check_sampling()
    submit(engine, "later", 2)
    assert len(run(engine)) == 1


def test_steps_that_run_are_finished_and_no_other_is_begun(engine):
    submit(engine, "a", 50)
    steps(engine, 10)
    core = engine.engine_core.engine_core
    request = next(iter(core.scheduler.requests.values()))
    before = request.num_computed_tokens
    assert finish_steps(engine) == []
    assert not core.batch_queue
    assert request.num_computed_tokens == before
    (output,) = run(engine)
    assert len(output.outputs[0].token_ids) == 50
