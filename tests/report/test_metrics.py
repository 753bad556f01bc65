"""Sinks of metrics: each writes its values once, in the right place."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vectorlm import SamplingEngine
from vectorlm.errors import CheckpointError
from vectorlm.ranks import wait
from vectorlm.report.metrics import FanOut, JsonlSink, ProgressSink
from vectorlm.report.step_lines import sample_with_progress
from vectorlm.sampling.inline_engines import FakeEngine


def lines_of(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_each_write_is_one_line_on_disk_before_the_sink_closes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with JsonlSink(path) as sink, JsonlSink(tmp_path / "second.jsonl") as second:
        FanOut([sink, second]).write(10, {"train/loss": 2.5, "eval/accuracy": 0})
        assert lines_of(path) == [{"step": 10, "train/loss": 2.5, "eval/accuracy": 0.0}]
        assert lines_of(tmp_path / "second.jsonl") == lines_of(path)
        sink.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    # JSON cannot represent the first three values.
    assert path.read_text().splitlines()[1] == '{"step": 1, "a": null, "b": null, "c": null, "d": 1.0}'


def test_no_metric_replaces_the_number_of_the_step(tmp_path: Path) -> None:
    with JsonlSink(tmp_path / "metrics.jsonl") as sink:
        sink.write(3, {"step": 100.0, "a": 1.0})
    assert lines_of(tmp_path / "metrics.jsonl") == [{"step": 3, "a": 1.0}]


def test_a_fresh_run_sets_the_files_of_earlier_ones_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    for loss in (4.0, 3.0, 2.0):
        with JsonlSink(path) as sink:
            sink.write(1, {"train/loss": loss})
    kept = [tmp_path / "metrics.jsonl.1", tmp_path / "metrics.jsonl.2", path]
    assert [lines_of(file) for file in kept] == [
        [{"step": 1, "train/loss": loss}] for loss in (4.0, 3.0, 2.0)
    ]
    assert sorted(os.listdir(tmp_path)) == sorted(file.name for file in kept)


@pytest.mark.parametrize("text", ['{"step": 30}\n{"step": 4', '{"step": 30}', '{"step": 20', ""])
def test_resuming_drops_the_lines_of_later_steps_and_a_last_line_without_an_end(
    tmp_path: Path, text: str
) -> None:
    path, kept = tmp_path / "metrics.jsonl", [{"step": 10}, {"step": 20}] if text else []
    if text:
        path.write_text(f'{{"step": 10}}\n{{"step": 20}}\n{text}')
    with JsonlSink(path, resume_step=20) as sink:
        sink.write(30, {"train/loss": 1.0})
    assert lines_of(path) == [*kept, {"step": 30, "train/loss": 1.0}]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("line", ["loss went down", "[1]", '{"train/loss": 1.0}'])
def test_resuming_refuses_a_file_of_something_else_and_leaves_it_alone(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    text = f'{{"step": 10}}\n{line}\n{{"step": 30}}\n'
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        JsonlSink(path, resume_step=20)
    assert path.read_text() == text
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_outside_a_terminal_progress_is_plain_lines_at_the_interval() -> None:
    now = [0.0]
    stream = io.StringIO()
    with ProgressSink(100, interval_s=10, stream=stream, clock=lambda: now[0]) as sink:
        for step in range(1, 6):
            now[0] = 4.0 * step
            numbers = {"train/loss": 3 - step / 4, "train/learning_rate": 1e-3, "train/tokens_per_s": 1234}
            sink.write(step, numbers)
    assert stream.getvalue() == (
        "step 1/100: loss 2.7500, lr 1.00e-03, 1,234 tokens/s\n"
        "step 4/100: loss 2.0000, lr 1.00e-03, 1,234 tokens/s\n"
    )


def test_outside_a_terminal_evaluations_and_the_last_step_are_always_printed() -> None:
    stream = io.StringIO()
    with ProgressSink(300, interval_s=10, stream=stream, clock=lambda: 0.0) as sink:
        sink.write(1, {"train/loss": 2.0})
        sink.say("a sampled answer")
        sink.write(2, {"eval/loss": 1.5, "eval/accuracy": 0.125})
        sink.write(3, {"train/loss": 1.25})
        sink.write(300, {"train/loss": 1.0})
    assert stream.getvalue().splitlines() == [
        "step 1/300: loss 2.0000",
        "a sampled answer",
        "step 2/300: loss 2.0000, eval loss 1.5000, right 12%",
        "step 300/300: loss 1.0000",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_model_writes_does_not_steer_the_terminal(is_terminal: bool) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    with ProgressSink(3, stream=stream) as sink:
        sink.say("title \x1b]0;mine\x07 and\rback \u202eright\nnext\tline é 😀 \ud83d")
    said = stream.getvalue()
    assert "title \\x1b]0;mine\\x07 and\\rback \\u202eright\nnext\tline é 😀 \\ud83d" in said


def test_importing_report_loads_no_heavy_library() -> None:
    heavy = {"torch", "wandb", "matplotlib", "vllm"}
    light = ", ".join(f"vectorlm.report.{name}" for name in ("metrics", "plots", "runs", "page"))
    script = f"import sys, {light}; print({heavy} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


PROMPTS = [f"prompt {number}" for number in range(100)]


def answer(prompt, version):
    return f"{prompt}!"


@pytest.mark.parametrize("number", [1, 8, 9, 100])
def test_completions_come_in_the_order_of_the_prompts(number):
    with FakeEngine(answer) as engine:
        found = sample_with_progress(engine, PROMPTS[:number], {"max_tokens": 100})
        assert [completion.text for (completion,) in found] == [f"{prompt}!" for prompt in PROMPTS[:number]]
        assert found == engine.sample(PROMPTS[:number], {"max_tokens": 100})


def test_it_says_how_many_prompts_are_answered(monkeypatch, capsys):
    monkeypatch.setattr(wait, "AFTER_S", 0.05)
    monkeypatch.setattr(wait, "EVERY_S", 0.05)
    slow = {
        "inference": "vectorlm.sampling.backends.scripted:Scripted",
        "channel": "inline",
        "answers": answer,
    }
    # The engine answers eight prompts at a time, in a step of 0.05 s.
    with SamplingEngine("scripted", **slow, max_num_seqs=8, step_s=0.05) as engine:
        sample_with_progress(engine, PROMPTS, {"max_tokens": 100}, what="held-out")
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("held-out, prompts: done after")
    counts = [int(line.split()[2]) for line in lines[:-1]]
    assert counts == sorted(counts)
    assert any(0 < count < 100 for count in counts)


def test_what_cannot_be_finished_is_taken_back():
    with FakeEngine(answer, num_steps=3) as engine:
        engine.fail_next("sample", RuntimeError("no room"))
        with pytest.raises(Exception, match="no room"):
            sample_with_progress(engine, PROMPTS, {"max_tokens": 100})
        # `sleep` would refuse if a request were in flight.
        engine.sleep()
