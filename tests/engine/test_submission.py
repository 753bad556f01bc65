"""Requests in flight: `submit`, `poll`, and the handles that they return."""

import os
import signal
import threading
import time

import pytest
import torch
from child_processes import sampler_pid
from interrupt import interrupt
from rank_processes import on_ranks
from swap_cases import GREEDY
from torch.distributed.distributed_c10d import _get_default_store

from vectorlm import FakeEngine
from vectorlm.engine.handle import BatchHandle
from vectorlm.engine.messages import Generate
from vectorlm.errors import EngineError
from vectorlm.ranks.collectives import Collectives
from vectorlm.ranks.engine_ranks import EngineRanks
from vectorlm.ranks.topology import Topology

LONG = {"temperature": 0.0, "max_tokens": 250, "ignore_eos": True, "n": 1}


TINY_LLAMA = {"hidden_size": 64, "max_length": 256}
ENGINE_ARGS = {"max_model_len": 256}


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
    long, short = engine.submit([[2, 3]], LONG), engine.submit([[4]], {**GREEDY, "max_tokens": 2})
    first, second = wait_for(engine, 2)
    assert (first, second) == (short, long)
    assert engine.poll() == []
    assert len(long.result()[0][0].token_ids) == 250


def test_poll_leaves_out_what_was_asked_for_or_cancelled(engine):
    read, cancelled = engine.submit([[2]], GREEDY), engine.submit([[3]], GREEDY)
    read.result()
    cancelled.cancel()
    assert engine.poll() == []


def test_a_cancelled_batch_leaves_nothing_that_is_waited_for(engine):
    engine.sample([[2]], GREEDY)
    for _ in range(20):
        engine.submit([[3]], GREEDY).cancel()
    engine.sample([[2]], GREEDY)
    assert engine._channel._awaited == {}


def test_what_cannot_be_sent_is_the_callers_error_and_harms_nothing(engine):
    with pytest.raises(EngineError, match="pickle"):
        engine.sample([[2]], {"extra_args": {"lock": threading.Lock()}})
    assert len(engine.sample([[2]], GREEDY)) == 1


def test_an_interrupted_result_can_be_asked_for_again(engine):
    handle = engine.submit([[2, 3]] * 16, LONG)
    # Nothing is finished before the interrupt, however busy the machine is.
    os.kill(sampler_pid(), signal.SIGSTOP)
    try:
        interrupt(handle.result, after_s=0.1)
    finally:
        os.kill(sampler_pid(), signal.SIGCONT)
    assert [len(answers[0].token_ids) for answers in handle.result()] == [250] * 16


def test_an_interrupt_while_a_large_batch_is_being_sent_leaves_the_line_whole(engine):
    prompts = [list(range(2, 44)) * 5] * 300
    interrupt(lambda: submit_for_ever(engine, prompts), after_s=0.05)
    assert len(engine.sample([[2]], GREEDY)) == 1


def test_sharded_prompts_of_a_lone_rank_are_all_prompts(engine):
    prompts = [[2, 3], [4]]
    assert engine.sample_sharded(prompts, GREEDY) == engine.sample(prompts, GREEDY)
    assert engine.sample_sharded([], GREEDY) == []
    (output,) = engine.generate_sharded([[4]], GREEDY)
    assert tuple(output.outputs[0].token_ids) == engine.sample([[4]], GREEDY)[0][0].token_ids


@pytest.mark.parametrize("given", [{}, {"n": 3}, {"stop": ["a", "e"]}, {"detokenize": False}], ids=str)
def test_an_engine_s_completions_have_the_text_of_its_request_outputs(engine, given):
    params = {"max_tokens": 24, "seed": 3, "logprobs": 0, "ignore_eos": True, **given}
    prompts = [[2, 3, 4], [5, 6], [7], [8, 9, 10]]
    sampled, outputs = engine.sample(prompts, params), engine.generate(prompts, params)
    texts = [[each.text for each in completions] for completions in sampled]
    assert texts == [[each.text for each in output.outputs] for output in outputs]
    assert any(map(any, texts)) == given.get("detokenize", True)
    ids = [[list(each.token_ids) for each in completions] for completions in sampled]
    assert ids == [[list(each.token_ids) for each in output.outputs] for output in outputs]
    if given.get("detokenize", True):
        first = outputs[0].outputs[0]
        assert any(
            each[token].decoded_token for token, each in zip(first.token_ids, first.logprobs, strict=True)
        )


class Recording:
    """A channel that answers nothing and keeps what it is told to cancel."""

    def __init__(self):
        self.cancelled = []

    def send(self, command):
        return 7

    def has_answer(self, number, silence_s):
        return False

    def cancel(self, number):
        self.cancelled.append(number)


def test_a_handle_that_nobody_holds_takes_its_requests_back():
    topology, channel = Topology(), Recording()
    handle = BatchHandle(
        "a",
        Generate([[2, 3]], None, False),
        places=range(1),
        engine_ranks=EngineRanks(topology, Collectives(topology, 10.0)),
        channel=channel,
        max_num_seqs=8,
        silence_s=10.0,
    )
    assert not handle.is_finished_here()
    assert channel.cancelled == []
    del handle
    assert channel.cancelled == [7]


def sample_often(topology):
    store = _get_default_store()
    with FakeEngine(lambda prompt, version: "a", topology=topology) as engine:
        counts = []
        for _ in range(20):
            engine.sample(["a", "b"])
            counts.append(store.num_keys())
        torch.distributed.barrier()
    return counts


def test_a_long_run_leaves_no_keys_in_the_store():
    for counts in on_ranks(2, sample_often):
        assert counts[-1] <= counts[2] + 2
