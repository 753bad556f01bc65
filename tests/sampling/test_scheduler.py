"""Calls and answers of a scheduler; its clock moves only in the backend's steps."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

from vectorlm.errors import ChecksumMismatch, EngineError
from vectorlm.sampling import messages
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.sampler import scheduler
from vectorlm.sampling.sampler.scheduler import BREAK_S, Scheduler, open_backend
from vectorlm.types import Completion


class Recording:
    """A backend that records its calls; a step takes a second and finishes the requests in `finished`."""

    version, vocab_size = -1, None
    adapters: ClassVar = {"policy": -1}

    def __init__(self):
        self.now, self.calls, self.finished, self.error = 100.0, [], [], None

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))

    def load(self, *args):
        self.calls.append(("load", *args))
        if self.error:
            raise self.error
        return 0.5

    def poll(self):
        self.now += 1.0
        if self.error:
            raise self.error
        answer = Completion((97,), (98,), (), (-1,), "b", "stop")
        return [RequestOutput(name, [answer]) for name in self.finished]


@pytest.fixture
def backend(monkeypatch):
    backend = Recording()
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(perf_counter=lambda: backend.now))
    return backend


def value_of(answers):
    ((_, (value, _)),) = answers
    return value


def error_of(answers):
    ((_, (_, error)),) = answers
    return str(error)


GENERATE = messages.Generate([[97], [97]], {"n": 1}, as_request_outputs=False)
KEEP, FINISH = messages.BeginUpdate("keep"), messages.FinishUpdate(3, [7, 8], ("base", "adapter"))


def test_commands_reach_the_backend_with_all_that_they_say(backend):
    engine = Scheduler(backend)
    engine.carry_out(1, messages.Connect(["tensor"], "/proc/1/fd/2", "adapter"))
    engine.carry_out(2, GENERATE)
    engine.carry_out(3, messages.BeginUpdate("recompute"))
    engine.carry_out(4, FINISH)
    engine.carry_out(5, messages.Abort(2))
    assert backend.calls == [
        ("connect", ["tensor"], "/proc/1/fd/2", "adapter"),
        ("submit", "2-0", [97], {"n": 1}),
        ("submit", "2-1", [97], {"n": 1}),
        ("pause",),
        ("load", 3, [7, 8], ("base", "adapter"), True),
        ("resume",),
        ("cancel", ["2-0", "2-1"]),
    ]


def test_the_weights_wake_for_an_update_and_the_cache_does_not(backend):
    engine = Scheduler(backend)
    engine.carry_out(1, messages.Sleep(weights=True, kv_cache=True))
    engine.carry_out(2, messages.BeginUpdate())
    assert ("wake_up", frozenset({"weights"})) in backend.calls
    engine.carry_out(3, FINISH)
    assert "the engine is asleep (kv_cache)" in error_of(engine.carry_out(4, GENERATE))


def test_only_running_requests_can_stall(backend):
    engine = Scheduler(backend)
    for running, stall_s in ((False, 0.0), (True, 2.0)):
        if running:
            engine.carry_out(1, GENERATE)
        engine.carry_out(2, KEEP)
        backend.now += 2.0
        assert value_of(engine.carry_out(3, FINISH)).stall_s == stall_s


def test_steps_with_no_break_between_them_are_one_busy_span(backend):
    engine = Scheduler(backend)
    engine.carry_out(1, GENERATE)
    for pause_s in (0.0, 0.9 * BREAK_S, 2 * BREAK_S):
        backend.now += pause_s
        engine.step()
    engine.carry_out(2, KEEP)
    first, second = value_of(engine.carry_out(3, FINISH)).busy
    assert first == pytest.approx((100.0, 102.0 + 0.9 * BREAK_S))
    assert second == pytest.approx((102.0 + 2.9 * BREAK_S, 103.0 + 2.9 * BREAK_S))
    engine.carry_out(4, KEEP)
    assert value_of(engine.carry_out(5, FINISH)).busy == (), "each update tells what was since the last"


def test_an_engine_that_failed_in_a_step_is_not_healed_by_an_update(backend):
    engine, backend.error = Scheduler(backend), RuntimeError("out of luck")
    engine.carry_out(1, GENERATE)
    text = error_of(engine.step())
    assert "RuntimeError: out of luck\n\nIn the sampler process:\nTraceback" in text
    assert ", in poll\n" in text
    backend.error = None
    engine.carry_out(2, KEEP)
    engine.carry_out(3, FINISH)
    assert "started again: out of luck" in error_of(engine.carry_out(4, GENERATE))
    assert not engine.busy


def test_an_update_that_fails_takes_what_runs_along_and_the_next_one_heals(backend):
    engine = Scheduler(backend)
    engine.carry_out(1, GENERATE)
    engine.carry_out(2, KEEP)
    backend.error = ChecksumMismatch("another tensor")
    (lost, failed), number = engine.carry_out(3, FINISH), 1
    assert (lost[0], str(lost[1][1])) == (number, "a weight update failed: another tensor")
    assert failed == (3, (None, backend.error))
    assert backend.calls[-2:] == [("cancel", ["1-0", "1-1"]), ("resume",)]
    assert error_of(engine.carry_out(4, GENERATE)) == "another tensor"
    backend.error = None
    engine.carry_out(5, KEEP)
    assert value_of(engine.carry_out(6, FINISH)).stall_s == 0.0
    assert engine.carry_out(7, GENERATE) == []
    assert engine.busy


def test_an_update_that_is_interrupted_is_to_be_made_again(backend):
    engine = Scheduler(backend)
    engine.carry_out(1, KEEP)
    backend.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.carry_out(2, FINISH)
    assert "call update() again" in error_of(engine.carry_out(3, GENERATE))


def test_a_prompt_that_is_refused_leaves_none_of_its_batch_behind(backend):
    engine = Scheduler(backend)

    def submit(name, prompt, params):
        if name == "1-1":
            raise ValueError("too long")

    backend.submit = submit
    assert "prompt 1 cannot be sampled: ValueError: too long" in error_of(engine.carry_out(1, GENERATE))
    assert backend.calls == [("cancel", ["1-0"])]
    assert not engine.busy


def test_answers_come_when_the_last_prompt_has_ended(backend):
    engine = Scheduler(backend)
    for number in (1, 2):
        engine.carry_out(number, GENERATE)
    backend.finished = ["1-1", "2-0", "0-0"]
    assert engine.step() == []
    backend.finished = ["1-0"]
    ((number, (_, error)),) = engine.step()
    assert (number, error) == (1, None)
    assert engine.busy
    backend.finished = ["2-1"]
    ((number, _),) = engine.step()
    assert number == 2
    assert not engine.busy


class Needs:
    def __init__(self, model, *, receiver, answers):
        self.given = model, receiver, answers


def test_a_backend_gets_its_arguments_and_no_others():
    name = f"{__file__}:Needs"
    assert open_backend(messages.Start("m", {"answers": 1}, "live", name)).given == ("m", "live", 1)
    for wrong in ({}, {"answers": 1, "answer": 2}):
        with pytest.raises(EngineError, match=r"cannot be built: .*argument"):
            open_backend(messages.Start("m", wrong, "live", name))
    with pytest.raises(EngineError, match="inference='wllm'"):
        open_backend(messages.Start("m", {}, "live", "wllm"))


def test_weights_that_sleep_wake_before_a_loader_is_recorded_on_them(backend):
    driver = Scheduler(backend)
    driver.carry_out(0, messages.Sleep(weights=True, kv_cache=True))
    driver.carry_out(1, messages.Connect((), None, "base"))
    assert [name for name, *_ in backend.calls] == ["sleep", "wake_up", "connect"]
    assert backend.calls[1] == ("wake_up", {"weights"})


def test_an_update_that_fails_leaves_weights_that_slept_shut(backend):
    engine = Scheduler(backend)
    engine.carry_out(0, messages.Sleep(weights=True, kv_cache=True))
    engine.carry_out(1, messages.BeginUpdate())
    backend.error = ChecksumMismatch("another tensor")
    engine.carry_out(2, FINISH)
    backend.error = None
    engine.carry_out(3, messages.WakeUp(weights=True, kv_cache=True))
    assert error_of(engine.carry_out(4, GENERATE)) == "another tensor"
