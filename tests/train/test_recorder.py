"""What is logged, evaluated and saved, and when."""

import pytest

from vectorlm.errors import ConfigError
from vectorlm.train.recorder import EarlyStopping, Recorder, Timer


class Evaluation:
    def evaluate(self, step):
        return {"eval/step": step}


class Checkpoints:
    def __init__(self):
        self.saved = {}

    def save(self, step, models, loop):
        self.saved[step] = loop

    def load(self, step, models):
        return self.saved[step]


def test_evaluations_are_due_every_n_steps_before_training_and_at_the_end():
    recorder = Recorder(num_steps=7, sink=None, evaluation=Evaluation(), evaluate_every=3)
    assert [step for step in range(8) if recorder.evaluate_if_due(step)] == [0, 3, 6, 7]
    assert Recorder(num_steps=7, sink=None).evaluate_if_due(7) == {}


def test_checkpoints_are_due_every_n_steps_and_a_run_resumes_from_one():
    checkpoints = Checkpoints()
    recorder = Recorder(num_steps=5, sink=None, checkpoints=checkpoints, save_every=2)
    for step in range(1, 6):
        recorder.save_if_due(step, {}, lambda step=step: {"seen": step})
    seen = {step: loop["seen"] for step, loop in checkpoints.saved.items()}
    assert seen == {2: 2, 4: 4, 5: 5}, "the last step is due too"
    assert recorder.resume({}) is None
    resumed = Recorder(num_steps=5, sink=None, checkpoints=checkpoints, resume_step=2)
    assert resumed.resume({})["seen"] == 2


def test_the_best_evaluation_and_the_end_of_a_run_that_stops_early_are_saved():
    checkpoints = Checkpoints()
    recorder = Recorder(
        num_steps=100,
        sink=None,
        checkpoints=checkpoints,
        save_every=4,
        stopping=EarlyStopping(patience=2, keeps_best=True, say=[].append),
    )
    for step, loss in enumerate([9.0, 8.0, 1.0, 2.0, 3.0], start=1):
        recorder.stopping.observe(step, {"eval/loss": loss})
        if step >= 3:
            recorder.save_if_due(step, {}, dict)
    assert recorder.stopping.is_over
    # The best, the fourth, and the last.
    assert sorted(checkpoints.saved) == [3, 4, 5]
    resumed = Recorder(
        num_steps=100, sink=None, checkpoints=checkpoints, resume_step=5, stopping=EarlyStopping(patience=2)
    )
    assert not resumed.stopping.is_over
    resumed.resume({})
    assert resumed.stopping.is_over
    assert resumed.stopping.best_step == 3


def test_an_evaluation_after_a_resume_that_lacks_the_metric_is_refused_and_that_at_the_end_is_not():
    recorder = Recorder(num_steps=5, sink=None, stopping=EarlyStopping("eval/acuracy", is_named=True))
    recorder.require_logged(5, {"eval/accuracy": 0.5})
    with pytest.raises(ConfigError, match="eval/acuracy"):
        recorder.require_logged(4, {"eval/accuracy": 0.5})


class HandClock:
    """A clock that moves when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_spans_of_one_name_add_up_and_nested_spans_count_for_both():
    clock = HandClock()
    timer = Timer(clock)
    with timer.span("step"):
        clock.now += 2.0
        with timer.span("publish"):
            clock.now += 0.5
    with timer.span("publish"):
        clock.now += 0.25
    assert timer.drain() == {"step": 2.5, "publish": 0.75}
    assert timer.drain() == {}


def test_a_span_that_raises_is_counted_and_raises_on():
    clock = HandClock()
    timer = Timer(clock)

    @timer.span("step")
    def fail():
        clock.now += 3.0
        raise KeyError("inside")

    with pytest.raises(KeyError):
        fail()
    assert timer.drain() == {"step": 3.0}


def test_spans_are_kept_and_short_breaks_left_out():
    clock = HandClock()
    timer = Timer(clock)
    for pause in (0.005, 2.0, 0.0):
        with timer.span("step"):
            clock.now += 1.0
        clock.now += pause
    assert timer.spans == [("step", 100.0, 102.005), ("step", 104.005, 105.005)]
    timer.drain()
    assert timer.spans == []
