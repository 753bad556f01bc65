"""Profiles: they add up phases, and record the requested steps."""

import torch

from vectorlm.report import metrics as profile
from vectorlm.report.metrics import ProfileSink
from vectorlm.report.panels import PhaseTimes
from vectorlm.train.recorder import Timer


def test_phases_add_up_and_an_evaluation_is_shown_in_parts():
    times = PhaseTimes()
    times.add({"time/forward_s": 1.0, "time/step_s": 9.0, "train/loss": 5.0})
    times.add(
        {"time/forward_s": 2.0, "time/evaluate_s": 5.0, "weights/update_s": 0.5, "sampler/generate_s": 3.5}
    )
    assert times.rows() == [
        ("forward", 3.0, 0.375),
        ("evaluate/publish", 0.5, 0.0625),
        ("evaluate/sample", 3.5, 0.4375),
        ("evaluate/score", 1.0, 0.125),
    ]
    assert times.rows(16.0)[-1] == ("other", 8.0, 0.5)
    overlapping = PhaseTimes()
    overlapping.add({"time/evaluate_s": 0.5, "weights/update_s": 0.125, "sampler/generate_s": 8.0})
    assert [(name, seconds) for name, seconds, _ in overlapping.rows()] == [
        ("evaluate/publish", 0.125),
        ("evaluate/sample", 0.375),
    ]
    table = times.table(16.0, num_steps=2).splitlines()
    assert table[1].split()[:4] == ["forward", "3.00", "19%", "1500.0"]
    assert table[-1].split() == ["all", "16.00", "100%", "8000.0"]


def run_steps(sink, steps):
    with sink:
        for step in steps:
            torch.ones(4).sum()
            sink.write(step, {"time/forward_s": 1.0})


def test_traces_begin_after_the_warm_up_also_where_a_run_resumes(tmp_path):
    said = []
    run_steps(ProfileSink(tmp_path, 2, timer=Timer(), initial_step=10, say=said.append), range(11, 16))
    names = ["profile.txt", "trace-step-13.json.gz", "trace-step-14.json.gz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert said[-1].startswith("time by phase")


def test_no_step_is_recorded_beyond_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "MAX_BYTES", 1)
    said = []
    run_steps(ProfileSink(tmp_path, 3, timer=Timer(), say=said.append), range(7))
    assert [path.name for path in tmp_path.glob("trace*")] == ["trace-step-3.json.gz"]
    assert "later steps are not recorded" in said[1]


def test_what_was_timed_before_the_first_line_and_after_the_last_is_in_the_table(tmp_path):
    now = [100.0]
    timer = Timer(lambda: now[0])
    with timer.span("time/start_s"):
        now[0] += 4.0
    with ProfileSink(tmp_path, 1, timer=timer, say=lambda text: None, clock=lambda: now[0]) as sink:
        now[0] += 2.0
        sink.write(1, timer.drain())
        with timer.span("time/save_s"):
            now[0] += 2.0
    rows = [line.split()[:3] for line in (tmp_path / "profile.txt").read_text().splitlines()[1:]]
    assert rows == [
        ["start", "4.00", "50%"],
        ["save", "2.00", "25%"],
        ["other", "2.00", "25%"],
        ["all", "8.00", "100%"],
    ]
