"""The files of a run, read while they grow."""

import json

from vectorlm.report.live_run import GrowingFile, LiveRun, Sample
from vectorlm.report.step_lines import StepLines


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_a_growing_file_is_read_on_and_half_a_line_waits_for_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = GrowingFile(path, 10)
    assert not file.read()
    append(path, '{"step": 1}\n{"st')
    assert file.read()
    assert list(file.lines) == [{"step": 1}]
    assert not file.read()
    append(path, 'ep": 2}\n')
    assert file.read()
    assert list(file.lines) == [{"step": 1}, {"step": 2}]


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, '{"step": 1}\n{"st\n\n[3]\n{"step": 4}\n')
    file = GrowingFile(path, 10)
    file.read()
    assert list(file.lines) == [{"step": 1}, {"step": 4}]


def test_of_a_long_file_the_end_is_read_from_its_first_whole_line_on(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    append(path, "".join(json.dumps({"step": step}) + "\n" for step in range(100)))
    file = GrowingFile(path, 50, most_bytes=40)
    file.read()
    assert list(file.lines) == [{"step": 97}, {"step": 98}, {"step": 99}]


def test_a_run_that_resumes_or_starts_over_replaces_what_was_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = StepLines(path, key="step")
    for step in range(1, 5):
        lines.write(step, [{"train/loss": step}])
    run = LiveRun(tmp_path)
    assert run.read()
    assert (run.step, run.values("train/loss")) == (4, [1, 2, 3, 4])
    lines = StepLines(path, 2, key="step")
    lines.write(3, [{"train/loss": 30}])
    assert run.read()
    assert (run.step, run.values("train/loss")) == (3, [1, 2, 30])
    StepLines(path, key="step")
    assert run.read()
    assert (run.step, run.values("train/loss")) == (None, [])


def test_the_number_of_steps_is_what_the_run_noted_or_what_its_config_says(tmp_path):
    run = LiveRun(tmp_path)
    assert (run.read(), run.num_steps, run.has_files) == (False, None, False)
    (tmp_path / "config.yaml").write_text("rl:\n  max_steps: 7\n")
    assert (run.read(), run.num_steps, run.has_files) == (True, 7, True)
    (tmp_path / "run.json").write_text('{"num_steps": 9, "started_at": 1.0}')
    assert (run.read(), run.num_steps) == (True, 9)
    assert not run.read()


def test_a_step_s_time_and_its_phases_are_means_over_the_last_steps(tmp_path):
    rl = {"time/step_s": 4.0, "time/generate_s": 3.0, "time/update_s": 1.0, "time/stall_s": 0.5}
    lines = StepLines(tmp_path / "metrics.jsonl", key="step")
    lines.write(0, [{"eval/accuracy": 0.5, "sampler/generate_s": 100.0}])
    run = LiveRun(tmp_path)
    run.read()
    assert run.step_s is None
    for step in range(1, 41):
        lines.write(step, [rl | ({"sampler/generate_s": 6.0} if step % 2 else {})])
    run.read()
    assert run.step_s == 7.0
    assert run.phases() == {"generate": 3 / 7, "evaluate": 3 / 7, "update": 1 / 7}


def test_fine_tuning_without_phases_has_its_step(tmp_path):
    lines = StepLines(tmp_path / "metrics.jsonl", key="step")
    lines.write(1, [{"train/step_s": 3.0, "sampler/generate_s": 0.5, "weights/update_s": 0.5}])
    run = LiveRun(tmp_path)
    run.read()
    assert (run.step_s, run.phases()) == (4.0, {"step": 0.75, "evaluate": 0.25})


def test_samples_are_those_of_the_newest_step_each_group_first(tmp_path):
    rollouts = StepLines(tmp_path / "rollouts.jsonl")
    rollouts.write(1, [{"group": 0, "prompt": "old", "completion": "x", "reward": 0.0}])
    chat = [{"role": "user", "content": "b"}]
    of_step = [(0, "a", "1", 0.5), (0, "a", "2", None), (1, chat, "3", 1.0), (2, [4, 5], "4", 0.0)]
    names = ("group", "prompt", "completion", "reward")
    rollouts.write(2, [dict(zip(names, row, strict=True)) for row in of_step])
    run = LiveRun(tmp_path)
    run.read()
    assert run.samples() == [
        Sample(2, "a", "1", 0.5),
        Sample(2, "b", "3", 1.0),
        Sample(2, "(2 tokens)", "4", 0.0),
        Sample(2, "a", "2", None),
    ]


def test_without_rollouts_the_answers_of_the_last_evaluation_are_shown(tmp_path):
    named = tmp_path / "elsewhere.jsonl"
    (tmp_path / "config.yaml").write_text(f"train_parameters: {{sampler: {{output_jsonl_path: {named}}}}}\n")
    run = LiveRun(tmp_path)
    run.read()
    assert run.samples() == []
    answers = StepLines(named)
    answers.write(0, [{"prompt": "a", "options": ["x"]}])
    answers.write(
        5, [{"prompt": "a", "options": ["y", "z"], "rewards": [1.0, None]}, {"prompt": "b", "options": ["w"]}]
    )
    run.read()
    assert run.samples() == [Sample(5, "a", "y", 1.0), Sample(5, "a", "z", None), Sample(5, "b", "w", None)]
