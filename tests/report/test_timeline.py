"""The picture of who did what when."""

import json

from vectorlm.report.timeline import Timeline, last_steps, plot_timeline

TRAINER = [("time/publish_s", 10.0, 10.5), ("time/generate_s", 10.5, 12.0), ("time/update_s", 12.0, 14.0)]


def test_spans_are_kept_by_phase_and_drawn(tmp_path):
    timeline = Timeline(tmp_path / "timeline.jsonl")
    timeline.write(1, [*TRAINER, ("time/step_s", 10.0, 14.0)], [(9.0, 9.5), (10.5, 13.0)])
    (line,) = map(json.loads, (tmp_path / "timeline.jsonl").read_text().splitlines())
    assert line["train_step"] == 1
    assert line["trainer"] == [["publish", 10.0, 10.5], ["generate", 10.5, 12.0], ["update", 12.0, 14.0]]
    assert line["engine"] == [[9.0, 9.5], [10.5, 13.0]]
    plot_timeline(tmp_path / "timeline.jsonl", tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_other_ranks_write_nothing_and_nothing_is_drawn_of_nothing(tmp_path):
    Timeline(None).write(1, TRAINER, [])
    plot_timeline(tmp_path / "timeline.jsonl", tmp_path / "timeline.png")
    assert list(tmp_path.iterdir()) == []


def test_the_picture_ends_with_the_last_step_and_not_with_the_evaluation_after_it(tmp_path):
    timeline = Timeline(tmp_path / "timeline.jsonl")
    for step in range(1, 15):
        timeline.write(step, [*TRAINER, ("time/evaluate_s", 14.0, 30.0)], [(10.5, 13.0)])
    lines = last_steps(tmp_path / "timeline.jsonl")
    assert [line["train_step"] for line in lines] == list(range(3, 15))
    assert [name for name, *_ in lines[0]["trainer"]] == ["publish", "generate", "update", "evaluate"]
    assert [name for name, *_ in lines[-1]["trainer"]] == ["publish", "generate", "update"]
