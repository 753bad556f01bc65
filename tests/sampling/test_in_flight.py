"""Requests in flight: handles, interrupts, and updates of the weights while sequences are sampled.

The tests of updates check each token's weights and KV cache.
"""

import gc
import math
import os
import signal
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from in_flight_cases import LONG, OTHER, PROMPT, another, check_tokens_against_their_caches
from interrupt import interrupt
from kit.rank_processes import on_ranks
from swap_cases import GREEDY, largest_gap

from vectorlm import FakeEngine, SamplingEngine
from vectorlm.errors import EngineError
from vectorlm.ranks.topology import Topology

LAST_CORE = max(os.sched_getaffinity(0))
LONG_GREEDY = {"temperature": 0.0, "max_tokens": 250, "ignore_eos": True, "n": 1}


TINY_LLAMA = {"hidden_size": 64, "max_length": 1024}
ENGINE_ARGS = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20, "devices": [LAST_CORE]}


def wait_for(engine, count):
    finished = []
    while len(finished) < count:
        finished += engine.poll()
        time.sleep(0.01)
    return finished


def submit_for_ever(engine, prompts):
    while True:
        engine.submit(prompts, {"max_tokens": 1}).cancel()


def test_batches_run_at_the_same_time_and_a_short_one_overtakes(engine):
    long, short = engine.submit([[2, 3]], LONG_GREEDY), engine.submit([[4]], {**GREEDY, "max_tokens": 2})
    first, second = wait_for(engine, 2)
    assert (first, second) == (short, long)
    assert engine.poll() == []
    assert len(long.result()[0][0].token_ids) == 250


def test_a_batch_that_was_read_or_cancelled_is_not_polled_or_waited_for(engine):
    read, cancelled = engine.submit([[2]], GREEDY), engine.submit([[3]], GREEDY)
    read.result()
    cancelled.cancel()
    assert engine.poll() == []
    for _ in range(20):
        engine.submit([[3]], GREEDY).cancel()
    engine.sample([[2]], GREEDY)
    assert engine._channel._awaited == {}


def test_a_batch_that_nobody_keeps_is_cancelled_with_a_warning(engine):
    engine.sample([[2]], GREEDY)
    for _ in range(20):
        with pytest.warns(RuntimeWarning, match="submit"):
            engine.submit([[2, 3]], LONG_GREEDY)
    assert engine.poll() == []
    assert not engine._open
    engine.sample([[2]], GREEDY)
    assert (engine._channel._awaited, engine._channel._answers) == ({}, {})


def test_a_batch_whose_result_was_read_is_let_go_of_in_silence(engine):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        assert len(engine.submit([[2]], GREEDY).result()) == 1
        engine.submit([[2]], GREEDY).cancel()
        gc.collect()
    assert caught == []
    assert not engine._open


def drop_on_one_rank(topology):
    """Drop one of two batches on one rank; return the text of the other batch, and of a later request."""
    found = {}
    for dropping in range(2):
        with (
            FakeEngine(lambda prompt, version: prompt, topology=topology) as engine,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", RuntimeWarning)
            handles = engine.submit_many([(["a"], None), (["b"], None)])
            if topology.rank == dropping:
                del handles[0]
            polled = []
            while not polled:
                polled = engine.poll(0.1)
            assert polled == handles[-1:]
            assert engine.poll() == []
            with pytest.raises(EngineError, match="were cancelled") if len(handles) == 2 else nullcontext():
                handles[0].result()
            found[dropping] = polled[0].result()[0][0].text, engine.sample(["c"])[0][0].text
    return found


def test_a_batch_that_one_rank_lets_go_of_is_cancelled_on_all():
    assert on_ranks(2, drop_on_one_rank) == [dict.fromkeys(range(2), ("b", "c"))] * 2


def change_params_in_flight(topology, num_engines, kind):
    """Submit prompts and change their parameters before the last chunk is drawn; return the lengths of the answers."""
    with SamplingEngine(
        "scripted",
        inference="vectorlm.sampling.backends.scripted:Scripted",
        topology=topology,
        channel="inline",
        answers=lambda prompt, version: "x" * 40,
        max_num_seqs=4,
        data_parallel_size=num_engines,
    ) as engine:
        params = {"max_tokens": 8, "stop_token_ids": [4]}
        given = {"one": params, "list": [params] * 20, "sharded": params}[kind]
        submit = engine._submit_sharded if kind == "sharded" else engine.submit
        batch = submit(["q"] * 20, given)
        params["max_tokens"] = 2
        params["stop_token_ids"].append(ord("x"))
        return {len(completion.token_ids) for (completion,) in batch.result()}


@pytest.mark.parametrize("kind", ["one", "list", "sharded"])
def test_params_that_the_caller_changes_after_submit_are_the_next_requests(kind):
    assert change_params_in_flight(Topology(), 1, kind) == {8}


def test_several_engines_draw_the_params_of_the_time_of_submit():
    assert on_ranks(2, change_params_in_flight, 2, "one") == [{8}] * 2


def test_what_cannot_be_sent_is_the_callers_error_and_harms_nothing(engine):
    with pytest.raises(EngineError, match="pickle"):
        engine.sample([[2]], {"extra_args": {"lock": threading.Lock()}})
    assert len(engine.sample([[2]], GREEDY)) == 1


def test_an_interrupted_result_can_be_asked_for_again(engine):
    handle = engine.submit([[2, 3]] * 16, LONG_GREEDY)
    # No request can finish before the interrupt, even on a busy machine.
    os.kill(engine._channel.pid, signal.SIGSTOP)
    try:
        interrupt(handle.result, after_s=0.1)
    finally:
        os.kill(engine._channel.pid, signal.SIGCONT)
    assert [len(answers[0].token_ids) for answers in handle.result()] == [250] * 16


def test_an_interrupt_while_a_large_batch_is_being_sent_leaves_the_line_whole(engine):
    prompts = [list(range(2, 44)) * 5] * 300
    interrupt(lambda: submit_for_ever(engine, prompts), after_s=0.05)
    assert len(engine.sample([[2]], GREEDY)) == 1


@pytest.mark.parametrize("given", [{}, {"n": 3}, {"stop": ["a", "e"]}, {"detokenize": False}], ids=str)
def test_an_engine_s_completions_have_the_text_of_its_request_outputs(engine, given):
    params = {"max_tokens": 24, "seed": 3, "logprobs": 0, "ignore_eos": True, **given}
    prompts = [[2, 3, 4], [5, 6], [7], [8, 9, 10]]
    sampled, outputs = engine.sample(prompts, params), engine.generate(prompts, params)
    texts = [[completion.text for completion in completions] for completions in sampled]
    assert texts == [[completion.text for completion in output.outputs] for output in outputs]
    assert any(map(any, texts)) == given.get("detokenize", True)
    ids = [[list(completion.token_ids) for completion in completions] for completions in sampled]
    assert ids == [[list(completion.token_ids) for completion in output.outputs] for output in outputs]
    if given.get("detokenize", True):
        first = outputs[0].outputs[0]
        assert any(
            by_token[token].decoded_token
            for token, by_token in zip(first.token_ids, first.logprobs, strict=True)
        )


@pytest.mark.slow
def test_an_engine_keeps_to_the_cores_that_are_its_own(engine):
    engine.wait_until_ready()
    for thread in Path(f"/proc/{engine._channel.pid}/task").iterdir():
        assert os.sched_getaffinity(int(thread.name)) == {LAST_CORE}
    assert len(os.sched_getaffinity(0)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_tokens_are_of_the_weights_and_the_cache_that_their_version_says(engine, folder, in_flight):
    report = check_tokens_against_their_caches(engine, folder, in_flight)
    assert 0 < report.load_s <= report.stall_s <= report.total_s


def test_a_new_request_finds_no_blocks_of_old_weights(engine, folder):
    """The new request has the prompt of a request that still runs on the old blocks."""
    old, new = another(folder, 3), another(folder, 4)
    step = engine.version + 1
    engine.update(old, step)
    handle = engine.submit([PROMPT], {**LONG, "n": 1, "seed": 0})
    time.sleep(0.2)
    engine.update(new, step + 1, in_flight="keep")
    ((late,),) = engine.sample([PROMPT], {**LONG, "n": 1, "seed": 1, "max_tokens": 8})
    assert not handle.done()
    handle.result()
    ((again,),) = engine.sample([PROMPT], {**LONG, "n": 1, "seed": 2, "max_tokens": 8})
    assert largest_gap([late, again], new) < 1e-5


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
            assert all(math.isfinite(logprob) for logprob in completion.sampler_logprobs)
        if all(len(set(completion.versions)) > 2 for completion in completions):
            return
    raise AssertionError("the updates never met the requests on their way")


def refuse_on_two_engines(topology):
    """Return the errors of `update` and `sleep` during a batch larger than both engines, and during a single prompt."""
    model, found = torch.nn.Linear(2, 2), []
    with SamplingEngine(
        "scripted",
        inference="vectorlm.sampling.backends.scripted:Scripted",
        topology=topology,
        channel="inline",
        answers=lambda prompt, version: f"{prompt}@{version}",
        max_num_seqs=4,
        data_parallel_size=2,
    ) as engine:
        engine.update(model, 0)
        for call in (lambda: engine.update(model, 1), engine.sleep):
            for count in (20, 1):
                handle = engine.submit(["q"] * count)
                if count > 1:
                    engine._channel.advance()  # Only drawn prompts reach an engine, and they are answered.
                with pytest.raises(EngineError) as caught:
                    call()
                found.append((str(caught.value), {completions[0].text for completions in handle.result()}))
                engine.sample(["q"] * 2)
        handle = engine.submit(["q"] * 20)
        skipped = engine.update(model, 0).skipped
        drained = engine.update(model, 1, in_flight="drain").version
        engine.sleep()
    return found, skipped, drained


def test_several_engines_refuse_as_one_and_all_go_on():
    for found, skipped, drained in on_ranks(2, refuse_on_two_engines):
        texts = [text for text, _ in found]
        assert all("requests are in flight" in text for text in texts[:2])
        assert all("cannot sleep while" in text for text in texts[2:])
        assert [answers for _, answers in found] == [{"q@0"}] * 4
        assert (skipped, drained) == (True, 1)


def test_sharded_prompts_of_a_lone_rank_are_all_prompts(engine):
    prompts = [[2, 3], [4]]
    assert engine.sample_sharded(prompts, GREEDY) == engine.sample(prompts, GREEDY)
    assert engine.sample_sharded([], GREEDY) == []
    (output,) = engine.generate_sharded([[4]], GREEDY)
    assert tuple(output.outputs[0].token_ids) == engine.sample([[4]], GREEDY)[0][0].token_ids
