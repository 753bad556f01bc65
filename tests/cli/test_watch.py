"""``vectorlm watch``: its view of a run in terminals of every size, and its end."""

import json
import math
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import pytest
from kit.rank_processes import on_ranks
from kit.sft_runs import make_config, train
from rich.cells import cell_len

from vectorlm.cli import main
from vectorlm.cli.watch import frame, sparkline
from vectorlm.report.runs import RunFolder
from vectorlm.report.step_lines import StepLines
from vectorlm.train.checkpoint.folder import locked


def text_of(path, width=80, height=24):
    lines = frame(RunFolder(path), width, height)
    assert len(lines) <= height
    assert max(cell_len(line.plain) for line in lines) <= width
    return "\n".join(line.plain for line in lines)


@pytest.fixture
def run(tmp_path):
    """Return the folder of a reinforcement learning run at step 12 of 40."""
    (tmp_path / "config.yaml").write_text("rl: {max_steps: 40}\n")
    (tmp_path / "run.json").write_text(json.dumps({"num_steps": 40, "started_at": time.time()}))
    lines = StepLines(tmp_path / "metrics.jsonl", key="step")
    for step in range(1, 13):
        metrics = {
            "reward/mean": step / 20,
            "policy/kl": 0.01,
            "policy/entropy": 1.5,
            "staleness/token_mean": 0.0,
        }
        metrics |= {"correction/ess": 0.97, "time/step_s": 2.0, "time/generate_s": 1.5, "time/update_s": 0.5}
        lines.write(step, [metrics | {"perf/tokens_per_s": 1234.0, "completion/length_mean": 8.0}])
    rollouts = StepLines(tmp_path / "rollouts.jsonl")
    answers = ["<answer>1+2</answer>", "two\nlines \x1b[2J", "汉字" * 50, "y" * 300]
    rollouts.write(
        12,
        [
            {"group": group, "prompt": "Use 1, 2. " * 30, "completion": answer, "reward": 1.0 - group / 4}
            for group, answer in enumerate(answers)
        ],
    )
    return tmp_path


def test_a_frame_shows_progress_curves_phases_and_samples(run):
    with locked(run):
        text = text_of(run)
    assert text.splitlines()[0] == f"{run.name}  running for 0 s"
    assert text.splitlines()[1] == "step 12 of 40, about 56 s left, 2.00 s a step, 1,234 tokens/s"
    assert "reward/mean                   0.6  ▁▂▂▃▄▄▅▅▆▇▇█" in text
    assert "correction/ess              97.0%  ▅▅▅▅▅▅▅▅▅▅▅▅" in text
    assert "generate                      75%  █████" in text
    assert "staleness" not in text
    assert "samples of step 12" in text
    assert "<answer>1+2</answer>" in text


def test_what_a_terminal_would_obey_is_written_out(run):
    text = text_of(run)
    assert "two\\nlines \\x1b[2J" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [2, 5, 10, 24, 60])
def test_a_frame_fits_any_terminal(run, width, height):
    assert "step 12 of" in text_of(run, width, height)


def test_a_loss_that_is_not_finite_is_said_to_be(tmp_path):
    lines = StepLines(tmp_path / "metrics.jsonl", key="step")
    lines.write(1, [{"train/loss": 1.0}])
    lines.write(2, [{"train/loss": None}])
    assert "train/loss              not finite" in text_of(tmp_path)


def test_a_curve_is_as_wide_as_it_may_be_and_shows_means():
    assert sparkline([0.0, 1.0], 10) == "▁█"
    assert sparkline([0.0, 0.0, 4.0, 6.0, 10.0, 10.0], 3) == "▁▅█"
    assert sparkline([1.0, math.nan, 2.0], 10) == "▁ █"
    assert sparkline([3.0, 3.0], 10) == "▅▅"
    assert sparkline([math.nan], 10) == " "
    assert sparkline([], 10) == ""
    assert sparkline([1.0], -3) == ""


def test_once_prints_one_frame_and_so_does_a_pipe(run, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["watch", str(run), "--once"]) == 0
    first = capsys.readouterr().out
    assert main(["watch", str(run)]) == 0
    assert capsys.readouterr().out == first
    assert first.startswith(f"{run.name}  stopped after step 12\n")
    assert "\x1b" not in first


class Dashboard:
    """A ``vectorlm watch`` process in a terminal of 80 by 24."""

    def __init__(self, path):
        self._terminal, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        command = [sys.executable, "-m", "vectorlm", "watch", str(path)]
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.text = ""

    def read_until(self, text, timeout_s=30.0):
        deadline = time.monotonic() + timeout_s
        while text not in self.text and time.monotonic() < deadline:
            if select.select([self._terminal], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self._terminal, 1 << 16).decode(errors="replace")
                except OSError:  # The child has closed its end of the terminal.
                    break
        assert text in self.text

    def end(self):
        self.read_until("\x1b[?1049l")
        code = self.process.wait(timeout=30)
        self.read_until("stopped after step")
        return code


def test_it_follows_a_run_and_stops_with_it(run):
    with locked(run):
        dashboard = Dashboard(run)
        dashboard.read_until("step 12 of 40")
        StepLines(run / "metrics.jsonl", 12, key="step").write(13, [{"reward/mean": 0.9, "time/step_s": 2.0}])
        dashboard.read_until("step 13 of 40")
        assert "stopped" not in dashboard.text
    assert dashboard.end() == 0
    # The last frame stays on the normal screen, below the prompt.
    assert "stopped after step 13" in dashboard.text.rpartition("\x1b[?1049l")[2]


def test_ctrl_c_leaves_the_terminal_as_it_was(run):
    with locked(run):
        dashboard = Dashboard(run)
        dashboard.read_until("step 12 of 40")
        dashboard.process.send_signal(signal.SIGINT)
        dashboard.read_until("\x1b[?1049l")
        assert dashboard.process.wait(timeout=30) == 0
    # The command shows the cursor again and prints no traceback.
    assert "\x1b[?25h" in dashboard.text
    assert "Traceback" not in dashboard.text


@pytest.mark.slow
def test_it_shows_a_real_run(inputs, tmp_path):
    on_ranks(1, train, make_config(inputs, tmp_path / "out"))
    text = text_of(tmp_path / "out")
    assert "ended" in text.splitlines()[0]
    assert text.splitlines()[1].startswith("step 12 of 12, ")
    assert "eval/loss" in text
