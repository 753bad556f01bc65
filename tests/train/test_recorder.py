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
