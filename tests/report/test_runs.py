"""Reading a run's folder while its files grow."""

import json
import os
import time
import tracemalloc

import pytest

from vectorlm.errors import CheckpointError, ConfigError
from vectorlm.report import runs, step_lines
from vectorlm.report.runs import RunFolder, Sample, differences, names_of, read_lines
from vectorlm.report.step_lines import StepLines
from vectorlm.train.checkpoint.folder import locked


def test_a_line_that_a_crash_cut_short_or_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 2.0}\n{"st\n\n[3]\n{"step": 4, "a": null}\n{"step": 5')
    assert list(read_lines(path)) == [{"step": 1, "a": 2.0}, {"step": 4, "a": None}]
    run = RunFolder(tmp_path)
    assert str(run.series("a")) == "[(1, 2.0), (4, nan)]"
    with path.open("a") as file:
        file.write(', "a": 3.0}\n')
    assert run.series("a")[-1] == (5, 3.0)
    assert run.step == 5


def test_of_a_long_file_the_end_is_read_from_its_first_whole_line_on(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(100)))
    assert list(read_lines(path, 40)) == [{"step": 97}, {"step": 98}, {"step": 99}]
    assert len(list(read_lines(path, 10**6))) == 100
    assert list(read_lines(tmp_path / "gone.jsonl", 40)) == []


@pytest.mark.parametrize("text", [b"", b'{"versions": {"py', b"\xff\xfe\x00", b"[1, 2]"])
def test_settings_that_a_crash_cut_short_are_none(tmp_path, text):
    for name in ("run.json", "config.yaml"):
        (tmp_path / name).write_bytes(text)
    run = RunFolder(tmp_path)
    assert run.start == run.config == {}


def test_a_run_that_resumes_or_starts_over_replaces_what_was_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = StepLines(path, key="step")
    for step in range(1, 5):
        lines.write(step, [{"train/loss": step}])
    run = RunFolder(tmp_path)
    assert (run.step, run.series("train/loss")) == (4, [(1, 1), (2, 2), (3, 3), (4, 4)])
    lines = StepLines(path, 2, key="step")
    lines.write(3, [{"train/loss": 30}])
    assert run.series("train/loss") == [(1, 1), (2, 2), (3, 30)]
    StepLines(path, key="step")
    assert (run.step, run.metric_names) == (None, [])


def test_a_resumed_run_reads_only_the_lines_that_it_repeats(tmp_path, monkeypatch):
    path = tmp_path / "rollouts.jsonl"
    lines = StepLines(path)
    for step in range(1, 4001):
        lines.write(step, [{"completion": "x" * 2000}, {"completion": "y" * 2000}])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"train_step": 4001, "comp')
    monkeypatch.setattr(step_lines, "BLOCK_BYTES", 1000)
    tracemalloc.start()
    StepLines(path, 3990)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[: 2 * 3990])
    StepLines(path, 0)
    assert path.read_bytes() == b""
    path.write_bytes(b'{"train_step": 1}\n{"step": 2}\n{"train_step": 3}\n')
    with pytest.raises(CheckpointError, match="train_step"):
        StepLines(path, 1)


def test_only_new_lines_of_metrics_are_parsed(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    lines = StepLines(path, key="step")
    parsed, loads = [], json.loads
    monkeypatch.setattr(runs.json, "loads", lambda text: parsed.append(text) or loads(text))
    run = RunFolder(tmp_path)
    for step in range(1, 21):
        lines.write(step, [{"train/loss": step}])
        assert len(run.series("train/loss")) == step
    assert len(parsed) == 20


def test_a_step_s_time_and_its_phases_are_means_over_the_last_steps(tmp_path):
    rl = {"time/step_s": 4.0, "time/generate_s": 3.0, "time/update_s": 1.0, "time/stall_s": 0.5}
    evaluation = {"time/evaluate_s": 6.0, "sampler/generate_s": 4.0, "weights/update_s": 1.0}
    lines = StepLines(tmp_path / "metrics.jsonl", key="step")
    lines.write(0, [{"eval/accuracy": 0.5, **evaluation}])
    run = RunFolder(tmp_path)
    assert run.step_s is None
    for step in range(1, 41):
        lines.write(step, [rl | (evaluation if step % 2 else {})])
    assert run.step_s == 7.0
    shares = {phase: share for phase, _, share in run.phases(30)}
    parts = {"evaluate/publish": 1 / 14, "evaluate/sample": 4 / 14, "evaluate/score": 1 / 14}
    assert shares == {"generate": 3 / 7, "update": 1 / 7, **parts}
    assert sum(seconds for _, seconds, _ in run.phases()) == 40 * 4 + 21 * 6


def test_a_rare_evaluation_counts_for_the_time_left_and_is_not_silence(tmp_path):
    run = make_run(tmp_path, step=0)
    lines = StepLines(tmp_path / "metrics.jsonl", key="step")
    for step in range(1, 39):
        lines.write(step, [{"time/step_s": 2.0} | ({"time/evaluate_s": 380.0} if step == 5 else {})])
    assert run.step_s == 12.0
    with locked(tmp_path):
        for seconds, is_well in ((500, True), (1000, False)):
            os.utime(tmp_path / "metrics.jsonl", 2 * (time.time() - seconds,))
            assert run.state()[1] is is_well


def make_run(folder, step=12):
    """Make a reinforcement learning run at `step` of 40."""
    (folder / "config.yaml").write_text("rl: {max_steps: 40}\n")
    (folder / "run.json").write_text(json.dumps({"num_steps": 40, "started_at": time.time() - 5}))
    lines = StepLines(folder / "metrics.jsonl", key="step")
    for number in range(1, step + 1):
        lines.write(number, [{"time/step_s": 2.0, "perf/tokens_per_s": 1234.0}])
    return RunFolder(folder)


def test_a_run_that_goes_on_says_how_far_it_is(tmp_path):
    run = make_run(tmp_path)
    with locked(tmp_path):
        assert run.state() == ("running for 5 s", True)
        assert run.progress() == "step 12 of 40, about 56 s left, 2.00 s a step, 1,234 tokens/s"
        an_hour_ago = time.time() - 3600
        os.utime(tmp_path / "metrics.jsonl", (an_hour_ago, an_hour_ago))
        assert run.state() == ("silent for 60 min: docs/howto/hang.md", False)
    assert run.progress() == "step 12 of 40, 2.00 s a step, 1,234 tokens/s"


def test_the_state_of_a_run_follows_its_steps_and_its_model(tmp_path):
    with locked(tmp_path):
        run = RunFolder(tmp_path)
        states = [run.state()]
        for step in (0, 40):
            make_run(tmp_path, step)
            states.append(run.state())
        assert [is_well for _, is_well in states] == [True] * 3
        assert len({text for text, _ in states}) == 3
    make_run(tmp_path, step=0)
    assert run.progress() == "no step yet"
    assert run.state() == ("stopped before its first step", False)
    make_run(tmp_path)
    assert run.state() == ("stopped after step 12", False)
    (tmp_path / "final-model").mkdir()
    assert run.state() == ("ended", True)
    # Make the model look older than the run.
    os.utime(tmp_path / "final-model", (1.0, 1.0))
    assert run.state() == ("stopped after step 12", False)
    make_run(tmp_path, step=40)
    assert run.state() == ("ended without a final model", False)
    os.utime(tmp_path / "final-model")
    assert run.state() == ("ended", True)
    (tmp_path / "run.json").unlink()
    (tmp_path / "config.yaml").write_text("rl: {max_steps: 7}\n")
    assert run.num_steps == 7


def test_samples_are_those_of_the_newest_step_each_group_first(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    rollouts = StepLines(tmp_path / "rollouts.jsonl")
    rollouts.write(1, [{"group": 0, "prompt": "old", "completion": "x", "reward": 0.0}])
    chat = [{"role": "user", "content": "b"}]
    of_step = [(0, "a", "1", 0.5), (0, "a", "2", None), (1, chat, "3", 1.0), (2, [4, 5], "4", 0.0)]
    names = ("group", "prompt", "completion", "reward")
    rollouts.write(2, [dict(zip(names, row, strict=True)) for row in of_step])
    assert RunFolder(tmp_path).newest_samples() == [
        Sample(2, "a", "1", 0.5),
        Sample(2, "b", "3", 1.0),
        Sample(2, "(2 tokens)", "4", 0.0),
        Sample(2, "a", "2", None),
    ]


def test_without_rollouts_the_answers_of_the_last_evaluation_are_shown(tmp_path):
    named = tmp_path / "elsewhere.jsonl"
    (tmp_path / "config.yaml").write_text(f"evaluation: {{output_jsonl_path: {named}}}\n")
    run = RunFolder(tmp_path)
    assert run.newest_samples() == []
    answers = StepLines(named)
    answers.write(0, [{"prompt": "a", "options": ["x"]}])
    answers.write(
        5, [{"prompt": "a", "options": ["y", "z"], "rewards": [1.0, None]}, {"prompt": "b", "options": ["w"]}]
    )
    assert run.newest_samples() == [
        Sample(5, "a", "y", 1.0),
        Sample(5, "a", "z", None),
        Sample(5, "b", "w", None),
    ]


@pytest.mark.parametrize("name", ["gone", "."])
def test_a_folder_that_is_not_a_run_s_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="output_dir"):
        RunFolder(tmp_path / name)


def test_runs_are_told_apart_by_the_settings_that_differ(tmp_path):
    texts = [
        "model: m\nrl: {algorithm: {name: grpo}}\n",
        "model: m\nrl: {algorithm: {name: ppo}, critic: {lr: 1}}\ntrain_parameters: {output_dir: x}\n",
    ]
    runs = []
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "run" / "config.yaml").write_text(text)
        runs.append(RunFolder(tmp_path / name / "run"))
    assert names_of(runs) == ["a/run", "b/run"]
    assert names_of([runs[0], runs[0]]) == ["run (1)", "run (2)"]
    assert differences(runs) == {"rl.algorithm.name": ["grpo", "ppo"], "rl.critic.lr": [None, 1]}
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.yaml").write_text("model: m\nrl: null\ndataset: {train_ds: x}\n")
    assert differences([runs[1], RunFolder(tmp_path / "text")]) == {"rl.algorithm.name": ["ppo", None]}
