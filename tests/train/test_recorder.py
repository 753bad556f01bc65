"""Intervals of logging, evaluation and checkpoints, and the best evaluation."""

import math

import pytest
import transformers
from kit.rank_processes import on_ranks

from vectorlm.errors import ConfigError
from vectorlm.train.recorder import EarlyStopping, Recorder, Timer, num_multiplied


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

    def is_finished(self, step):
        return step == 5


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
    repeated = []
    for step in (2, 5):
        resumed = Recorder(
            num_steps=5, sink=None, checkpoints=checkpoints, resume_step=step, after_save=repeated.append
        )
        assert resumed.resume({})["seen"] == step
    assert repeated == [2], "the run may have been killed after it saved step 2, but has finished step 5"


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
    # These are the best step, step 4 by the interval, and the last step.
    assert sorted(checkpoints.saved) == [3, 4, 5]
    resumed = Recorder(
        num_steps=100, sink=None, checkpoints=checkpoints, resume_step=5, stopping=EarlyStopping(patience=2)
    )
    assert not resumed.stopping.is_over
    resumed.resume({})
    assert resumed.stopping.is_over
    assert resumed.stopping.best_step == 3


def test_a_run_that_fails_keeps_the_step_whose_evaluation_was_in_flight():
    written = []

    class Sink:
        def write(self, step, metrics):
            written.append((step, metrics))

    recorder = Recorder(num_steps=5, sink=Sink())
    recorder.write(1, {"loss": 1.0}, lambda: {"eval/accuracy": 0.5})
    assert written == []
    recorder.close()
    recorder.close()
    assert written == [(1, {"loss": 1.0})]


class HandClock:
    """A clock that the test moves."""

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


def observe(stopping, values, metric="eval/loss", start=1):
    return [stopping.observe(step, {metric: value}) for step, value in enumerate(values, start)]


@pytest.mark.parametrize(
    ("metric", "values", "best_step"),
    [
        ("eval/loss", [3.0, 1.0, 2.0, 1.0], 2),
        ("eval/accuracy", [0.1, 0.0, 0.5, 0.5], 3),
        ("eval/loss", [math.nan, 5.0, math.nan], 2),
        ("eval/loss", [math.nan], None),
    ],
)
def test_the_first_of_the_best_evaluations_is_kept(metric, values, best_step):
    stopping = EarlyStopping(metric, keeps_best=True)
    observe(stopping, values, metric)
    assert stopping.best_step == best_step
    assert not stopping.is_over


def test_the_untrained_model_and_other_metrics_do_not_count():
    stopping = EarlyStopping(keeps_best=True, patience=1)
    assert stopping.observe(0, {"eval/loss": 0.0}) == {}
    assert stopping.observe(1, {"eval/accuracy": 1.0}) == {}
    assert stopping.observe(2, {"eval/loss": 9.0}) == {"eval/stopped_early": 0.0}
    assert stopping.best_step == 2


def test_training_is_over_after_as_many_evaluations_in_a_row_that_are_not_better_by_the_margin():
    said = []
    stopping = EarlyStopping(say=said.append, patience=2, min_delta=0.5, keeps_best=True)
    # 1.8 is not better than 2.0 by more than 0.5, but 1.4 is. Then two evaluations in a row are not better enough.
    metrics = observe(stopping, [2.0, 1.8, 1.4, 1.0, 1.2])
    assert [item["eval/stopped_early"] for item in metrics] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert stopping.is_over
    assert len(said) == 1
    assert stopping.best_step == 4, "the best checkpoint needs no margin"


def test_a_resumed_run_counts_on_and_more_patience_lets_it_go_on():
    stopping = EarlyStopping(patience=3, keeps_best=True)
    observe(stopping, [1.0, 2.0, 2.0])
    again = EarlyStopping(patience=3, keeps_best=True)
    again.load_state_dict(stopping.state_dict())
    assert again.best_step == 1
    assert not again.is_over
    observe(again, [2.0], start=4)
    assert again.is_over
    patient = EarlyStopping(patience=4, keeps_best=True)
    patient.load_state_dict(again.state_dict())
    assert not patient.is_over


def test_a_resumed_run_with_another_margin_counts_evaluations_anew():
    before = EarlyStopping(patience=3, min_delta=0.5, keeps_best=True, say=[].append)
    observe(before, [1.0, 0.9, 0.8, 0.7])
    assert before.is_over
    after = EarlyStopping(patience=3, min_delta=0.0, keeps_best=True, say=[].append)
    after.load_state_dict(before.state_dict())
    assert not after.is_over
    assert after.best_step == 4
    observe(after, [1.1, 1.1, 1.1], start=5)
    assert after.is_over


def test_a_resumed_run_that_follows_another_metric_starts_over_with_it():
    before = EarlyStopping("eval/accuracy", patience=3, keeps_best=True)
    observe(before, [0.7, 0.6], "eval/accuracy")
    said = []
    after = EarlyStopping("eval/loss", patience=3, keeps_best=True, say=said.append)
    after.load_state_dict(before.state_dict())
    assert after.best_step is None
    assert len(said) == 1
    # Compared with -0.7, the stored form of the best accuracy, every loss would be too high.
    observe(after, [2.0, 1.0, 1.5, 1.5], start=3)
    assert after.best_step == 4
    assert not after.is_over


@pytest.mark.parametrize(
    ("before", "after", "best_step"),
    [
        ({}, {"mode": "min"}, 5),
        ({"mode": "min"}, {}, 4),
        ({"falling": {"eval/my_error": True}}, {"mode": "max"}, 4),
        ({"falling": {"eval/my_error": True}}, {}, 1),
        ({}, {"mode": "max"}, 1),
    ],
)
def test_a_resumed_run_that_follows_the_other_direction_starts_over_with_it(before, after, best_step):
    first = EarlyStopping("eval/my_error", patience=2, keeps_best=True, **before)
    observe(first, [0.7, 0.7, 0.7], "eval/my_error")
    said = []
    second = EarlyStopping("eval/my_error", patience=2, keeps_best=True, say=said.append, **after)
    second.load_state_dict(first.state_dict())
    if best_step == 1:
        assert (second.best_step, second.is_over, said) == (1, True, [])
        return
    assert (second.best_step, second.is_over, len(said)) == (None, False, 1)
    # Each of them is worse than 0.7 in the new direction.
    observe(second, [0.9, 0.8] if best_step == 5 else [0.5, 0.4], "eval/my_error", start=4)
    assert second.best_step == best_step


def test_a_checkpoint_of_an_earlier_version_has_no_direction_and_is_loaded():
    before = EarlyStopping("eval/my_error", keeps_best=True, mode="min")
    observe(before, [0.7], "eval/my_error")
    state = {name: value for name, value in before.state_dict().items() if name not in ("sign", "falling")}
    after = EarlyStopping("eval/my_error", keeps_best=True, mode="min")
    after.load_state_dict(state)
    assert after.best_step == 1


def test_a_metric_that_a_resumed_run_does_not_log_is_refused_unless_it_was_logged_before():
    after = EarlyStopping("eval/acuracy", is_named=True)
    after.load_state_dict(EarlyStopping().state_dict())
    with pytest.raises(ConfigError, match="eval/acuracy"):
        after.require_logged({"eval/accuracy": 1.0})
    seen = EarlyStopping("eval/accuracy", is_named=True)
    seen.observe(0, {"eval/accuracy": 1.0})
    seen.require_logged({"eval/loss": 1.0})


def watch_on_rank(topology):
    """Observe accuracies that differ by rank, as with a random reward; return the best step and `is_over`."""
    stopping = EarlyStopping("eval/accuracy", keeps_best=True, patience=1)
    falls = (0.5, 0.4) if topology.is_main else (0.4, 0.5)
    observe(stopping, falls, "eval/accuracy")
    return stopping.best_step, stopping.is_over


def test_all_ranks_stop_where_rank_0_does():
    assert on_ranks(2, watch_on_rank) == [(1, True), (1, True)]


@pytest.mark.parametrize(
    ("metric", "more", "is_falling"),
    [
        ("eval/reward/no_loss", {}, False),
        ("eval/accuracy/anti_kl", {}, False),
        ("eval/accuracy/loss", {}, False),
        ("eval/kl", {}, True),
        ("eval/held_out/kl", {}, True),
        ("eval/held_out/loss", {}, True),
        ("eval/task/brier_score", {"falling": {"eval/task/brier_score": True}}, True),
        ("eval/task/loss", {"falling": {"eval/task/loss": False}}, False),
        ("eval/wikitext/mean_error", {"mode": "min"}, True),
        ("eval/loss", {"mode": "max"}, False),
    ],
)
def test_the_direction_of_a_metric_is_set_or_declared_and_not_guessed_for_rewards(metric, more, is_falling):
    stopping = EarlyStopping(metric, keeps_best=True, **more)
    observe(stopping, [0.9, 0.1, 0.5], metric)
    assert stopping.best_step == (2 if is_falling else 1)


def test_the_harness_says_which_metrics_fall():
    harness = pytest.importorskip("vectorlm.rl.evaluation.harness")
    found = {
        "results": {"task": {"alias": "task", "wer,none": 0.5, "acc,strict": 0.1, "odd,none": 0.0}},
        "higher_is_better": {"task": {"wer": False, "acc": True, "odd": None}},
    }
    assert harness.falling_of(found) == {"eval/task/wer": True, "eval/task/acc_strict": False}


def test_any_metric_of_an_evaluation_is_followed_by_its_name():
    for metric, values in (
        ("eval/pass_at_4", (0.1, 0.3, 0.2)),
        ("eval/task/word_perplexity", (9.0, 7.0, 8.0)),
        ("eval/step_brier", (0.3, 0.1, 0.2)),
        ("eval/mine/rejected_reward", (0.3, 0.1, 0.2)),
        ("eval/step_accuracy", (0.1, 0.3, 0.2)),
    ):
        stopping = EarlyStopping(metric, is_named=True, keeps_best=True)
        stopping.require_logged({metric: 0.0, "eval/accuracy": 0.0})
        for step, value in enumerate(values, start=1):
            stopping.observe(step, {metric: value})
        assert stopping.best_step == 2
        with pytest.raises(ConfigError, match="best_metric"):
            EarlyStopping(metric, is_named=True).require_logged({"eval/loss": 1.0, "time/step_s": 1.0})
    EarlyStopping("eval/accuracy").require_logged({})


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


def test_an_evaluation_after_a_resume_that_lacks_the_metric_is_refused_and_that_at_the_end_is_not():
    recorder = Recorder(num_steps=5, sink=None, stopping=EarlyStopping("eval/acuracy", is_named=True))
    recorder.require_logged(5, {"eval/accuracy": 0.5})
    with pytest.raises(ConfigError, match="eval/acuracy"):
        recorder.require_logged(4, {"eval/accuracy": 0.5})


def test_tied_embeddings_count_for_the_speed_only_as_an_output_layer():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=50, tie_word_embeddings=True, num_labels=1)
    kinds = (transformers.LlamaForCausalLM, transformers.LlamaForSequenceClassification)
    writer, scorer = (num_multiplied(kind(config)) for kind in kinds)
    assert writer - scorer == (50 - 1) * 16
