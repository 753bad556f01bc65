"""Requests of a rank's thread to its engine: sent together, paused during updates, answered, failed or cancelled."""

import gc
import os
import signal
import threading
import weakref
from pathlib import Path

import pytest
import torch

import vectorlm
from vectorlm.errors import EngineDied, EngineError, EngineTimeout


def scripted(**script):
    inference = "vectorlm.sampling.backends.scripted:Scripted"
    options = {"inference": inference, "answers": "{0} at {1}".format, "start_timeout_s": 120}
    return vectorlm.SamplingEngine("scripted", **options | script)


def ask(engine, text):
    return engine.local.ask(list(map(ord, text)), {"max_tokens": 20, "n": 1})


class Hear:
    def __call__(self, completion):
        raise AssertionError("nothing is sampled")


def text_of(future):
    return future.result(timeout=30)[0].text


def test_what_is_asked_during_an_update_is_answered_by_the_new_weights():
    model = torch.nn.Linear(2, 2)
    with scripted(num_steps=3, step_s=0.02) as engine:
        engine.update(model, 1)
        before = ask(engine, "a")
        engine.local.flush()
        with engine.local.held():
            during = ask(engine, "b")
            engine.local.flush()
            assert text_of(before) == "a at 1"
            assert engine.local.num_in_flight == 0
            assert not during.done()
        assert text_of(during) == "b at 1"
        late = ask(engine, "c")
        engine.local.flush()
        engine.update(model, 2, in_flight="drain")
        assert late.done()
        again = ask(engine, "d")
        engine.local.flush()
        with pytest.raises(EngineError, match="1 requests are in flight"):
            engine.update(model, 3)
        assert text_of(again) == "d at 2"


def test_a_request_that_is_taken_back_keeps_nothing_busy():
    with scripted(num_steps=10**9, step_s=0.02) as engine:
        engine.wait_until_ready()
        futures = [ask(engine, text) for text in "ab"]
        engine.local.flush()
        unsent = ask(engine, "c")
        for future in [*futures, unsent]:
            engine.local.take_back(future)
        assert engine.local.num_in_flight == 0
        # `sleep` would refuse if requests were in flight.
        engine.sleep()


@pytest.mark.parametrize("channel", ["process", "inline"])
def test_what_is_sampled_is_told_before_the_answer(channel):
    streaming = f"{Path(__file__).parent}/odd_backends.py:Streaming"
    with scripted(inference=streaming, channel=channel, num_steps=4, answers=["streamed"]) as engine:
        engine.wait_until_ready()
        parts = []
        future = engine.local.ask([1], {"max_tokens": 20, "n": 1}, parts.append)
        engine.local.flush()
        while not future.done():
            engine.local.advance()
        assert text_of(future) == "streamed"
    assert "".join(part.text for part in parts) == "str"


def test_a_dead_engine_fails_what_was_asked_and_what_is_asked_later():
    with scripted(num_steps=10**9, step_s=0.02) as engine:
        engine.wait_until_ready()
        before = ask(engine, "a")
        engine.local.flush()
        os.kill(engine._channel.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            text_of(before)
        hear = Hear()
        later = engine.local.ask([1], {"max_tokens": 20, "n": 1}, hear)
        engine.local.flush()
        with pytest.raises(EngineDied):
            text_of(later)
        # Requests that could not be sent are freed before the engine closes.
        gone = weakref.ref(hear)
        del hear, later
        gc.collect()
        assert gone() is None


def test_a_refused_request_fails_alone():
    with scripted() as engine:
        engine.wait_until_ready()
        refused, good = engine.local.ask([1], {"max_tokens": -1}), ask(engine, "a")
        engine.local.flush()
        with pytest.raises(EngineError):
            text_of(refused)
        assert text_of(good) == "a at -1"


class Dropping:
    """A number that drops a batch and collects it while it is pickled."""

    def __init__(self, kept):
        self.kept = kept

    def __reduce__(self):
        self.kept.clear()
        gc.collect()
        return int, (1,)


@pytest.mark.filterwarnings("ignore:the batch")
def test_a_batch_that_is_garbage_collected_while_another_is_sent_is_cancelled():
    with scripted(num_steps=10**9, step_s=0.02) as engine:
        handle = engine.submit([[1]])
        with pytest.raises(EngineTimeout):
            handle.result(timeout_s=0.1)
        # The frames of the error above refer to the batch, too.
        handle.itself = handle
        kept, others = [handle], []
        del handle
        drop = threading.Thread(
            target=lambda: others.append(engine.submit([[2]], {"max_tokens": Dropping(kept)})), daemon=True
        )
        drop.start()
        drop.join(30)
        assert others, "the send waits for itself"
        others[0].cancel()
        # `sleep` would refuse if requests were in flight.
        engine.sleep()
        assert engine._channel._awaited == {}


def test_an_engine_that_is_dropped_in_the_receiving_thread_is_closed():
    streaming = f"{Path(__file__).parent}/odd_backends.py:Streaming"
    engine = scripted(inference=streaming, num_steps=4, step_s=0.1, answers=["streamed"])
    engine.wait_until_ready()
    channel, kept = engine._channel, [engine]
    engine.local.ask([1], {"max_tokens": 20, "n": 1}, lambda part: kept.clear())
    engine.local.flush()
    del engine
    channel._receiver.join(30)
    assert (kept, channel._connection.closed) == ([], True)
    assert not Path(channel._scratch).exists()
