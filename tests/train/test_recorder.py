"""What is logged, evaluated and saved, and when."""

from vectorlm.train.recorder import Recorder


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
    assert checkpoints.saved == {step: {"seen": step} for step in (2, 4, 5)}, "the last step is due too"
    assert recorder.resume({}) is None
    resumed = Recorder(num_steps=5, sink=None, checkpoints=checkpoints, resume_step=2)
    assert resumed.resume({}) == {"seen": 2}


class Watch:
    """Calls the evaluation after step 3 the best, and ends training after step 5."""

    def __init__(self):
        self.seen = 0

    @property
    def best_step(self):
        return 3 if self.seen >= 3 else None

    @property
    def is_over(self):
        return self.seen >= 5

    def observe(self, step, metrics):
        self.seen = step
        return {"eval/seen": step}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_the_best_evaluation_and_the_end_of_a_run_that_stops_early_are_saved():
    checkpoints, watch = Checkpoints(), Watch()
    recorder = Recorder(num_steps=100, sink=None, checkpoints=checkpoints, save_every=4, watch=watch)
    for step in range(1, 6):
        assert recorder.observe(step, {}) == {"eval/seen": step}
        recorder.save_if_due(step, {}, dict)
    assert recorder.has_stopped
    assert checkpoints.saved == {step: {"watch": {"seen": step}} for step in (3, 4, 5)}
    resumed = Recorder(num_steps=100, sink=None, checkpoints=checkpoints, resume_step=5, watch=Watch())
    assert not resumed.has_stopped
    resumed.resume({})
    assert resumed.has_stopped
