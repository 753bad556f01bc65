"""Trackers: each gets the metrics of every step under their names."""

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate import tracking
from accelerate.state import PartialState
from tensorboardX.proto.event_pb2 import Event

from vectorlm.report.metrics import OF_ACCELERATE, open_trackers


def events(folder):
    """Read TensorBoard's files: length, checksum, record, checksum."""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def scalars(folder):
    return [
        (event.step, value.tag, value.simple_value)
        for event in events(folder)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]


def test_tensorboard_gets_every_value_and_the_config(tmp_path):
    (sink,) = open_trackers({"tensorboard": None}, tmp_path, {"model": "tiny"}, resume_step=None)
    with sink:
        sink.write(1, {"train/loss": 2.5})
        sink.write(2, {"train/loss": 2.25, "eval/accuracy": 0.5})
    folder = tmp_path / "tensorboard"
    expected = [(1, "train/loss", 2.5), (2, "train/loss", 2.25), (2, "eval/accuracy", 0.5)]
    assert scalars(folder) == expected
    assert any(b"model: tiny" in event.SerializeToString() for event in events(folder))


def test_tensorboard_has_a_step_soon_although_the_run_has_not_ended(tmp_path):
    (sink,) = open_trackers({"tensorboard": {"logdir": str(tmp_path)}}, Path("unused"), {}, None)
    with sink:
        sink.write(1, {"train/loss": 1.0})
        for _ in range(200):
            if (1, "train/loss", 1.0) in scalars(tmp_path):
                return
            time.sleep(0.1)
        pytest.fail("the step is not in the file")


def test_tensorboard_hides_the_steps_that_a_resumed_run_makes_again(tmp_path):
    for resume_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        (sink,) = open_trackers({"tensorboard": {"logdir": str(tmp_path)}}, Path("unused"), {}, resume_step)
        with sink:
            for step in steps:
                sink.write(step, {"train/loss": 1.0})
    starts = [event.step for event in events(tmp_path) if event.HasField("session_log")]
    assert starts == [3]
    assert not Path("unused").exists()


def test_trackio_keeps_the_values_of_a_run_named_as_its_folder(tmp_path):
    pytest.importorskip("trackio")
    script = (
        "import sys; from pathlib import Path; from vectorlm.report.metrics import OF_ACCELERATE, open_trackers\n"
        "for resume_step, step in ((None, 1), (1, 2)):\n"
        "    run = Path(sys.argv[1]) / 'grpo'\n"
        "    (sink,) = open_trackers({'trackio': {'project': 'mine'}}, run, {'model': 'm'}, resume_step)\n"
        "    with sink: sink.write(step, {'reward/mean': 0.5 * step})\n"
        "import trackio; (found,) = trackio.Api().runs('mine')\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "rows = SQLiteStorage.get_logs('mine', 'grpo')\n"
        "print(found.name, found.config['model'], [(row['step'], row['reward/mean']) for row in rows])\n"
    )
    # trackio keeps its run and its folder in global variables: use a separate process.
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert "grpo m [(1, 0.5), (2, 1.0)]" in run.stdout


@pytest.mark.parametrize("name", OF_ACCELERATE)
def test_trackers_of_accelerate_get_values_and_flat_settings_without_its_process_state(
    monkeypatch, tmp_path, name
):
    monkeypatch.setattr(PartialState, "_shared_state", {})  # Other tests in this process fill it.
    calls = []
    kind = tracking.LOGGER_TYPE_TO_CLASS[name]
    monkeypatch.setattr(kind, "start", lambda self: tracking.logger.debug(calls.append("start")))
    monkeypatch.setattr(kind, "store_init_configuration", lambda self, values: calls.append(values))
    monkeypatch.setattr(kind, "log", lambda self, values, step: calls.append((values, step)))
    monkeypatch.setattr(kind, "finish", lambda self: calls.append("finish"))
    (sink,) = open_trackers({name: None}, tmp_path, {"a": {"b": 1, "c": [1, 2]}, "m": "x"}, None)
    with sink:
        sink.write(8, {"reward/mean": 0.5})
    settings = {"a.b": 1, "a.c": "[1, 2]", "m": "x"}
    assert calls == ["start", settings, ({"reward/mean": 0.5}, 8), "finish"]
    assert not PartialState._shared_state


@pytest.mark.slow
def test_wandb_offline_keeps_settings_config_and_values(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    script = (
        "import sys; from pathlib import Path; import wandb; from vectorlm.report.metrics import open_wandb\n"
        "id_file = Path(sys.argv[1]) / 'id'\n"
        "settings = {'project': 'countdown', 'mode': 'offline', 'dir': sys.argv[1]}\n"
        "with open_wandb(settings, {'train_parameters': {'seed': 7}}, id_file, resumes=True) as sink:\n"
        "    sink.write(10, {'train/loss': 2.5}); sink.write(10, {'eval/accuracy': 0.5})\n"
        "    sink.write(20, {'train/loss': 2.25})\n"
        "    sink.write(11, {'train/loss': 2.75})\n"
        "    run = wandb.run; assert run.id == id_file.read_text()\n"
        "    print(run.project, run.config['train_parameters'], dict(run.summary))\n"
    )
    # wandb starts a service process and hooks into the interpreter: use a separate process.
    run = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "countdown {'seed': 7}" in run.stdout
    assert "'eval/accuracy': 0.5" in run.stdout
    # A resumed run repeats steps.
    assert "'train/loss': 2.75" in run.stdout
    assert "'step': 11" in run.stdout
    (tmp_path / "id").write_text("afew0rds")
    again = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    names = {path.parent.name.rsplit("-")[-1] for path in tmp_path.glob("wandb/offline-run-*/*.wandb")}
    assert len(names) == 2
    assert "afew0rds" in names
