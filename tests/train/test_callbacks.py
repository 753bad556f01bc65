"""Callbacks: their requests take effect from the right step on, on all ranks."""

import shutil
from dataclasses import replace

import pytest
from kit.rank_processes import on_ranks
from kit.sft_runs import lines, make_config, train

from vectorlm.errors import ConfigError
from vectorlm.runs.preflight.resume import find_resumption
from vectorlm.train.callbacks import Callbacks, RunControl, load_callback

OWN = """
import json, pathlib

class Both:
    def on_step(self, run, step, metrics):
        run.log({"own/rate": run.learning_rate})
        if step == 2:
            run.learning_rate = 5e-4
            run.save()
        if step == 4:
            run.stop()

    def on_checkpoint(self, run, step, folder):
        with open(run.output_dir / "saved.jsonl", "a") as file:
            file.write(json.dumps([step, (folder / "identity.json").is_file()]) + "\\n")

class AtCheckpoint:
    def on_checkpoint(self, run, step, folder):
        run.stop()

class Misspelt:
    def on_steps(self, run, step, metrics): ...

class Nothing: ...

class Needy:
    def __init__(self, path): ...
    def on_step(self, run, step, metrics): ...

class Clash:
    def on_step(self, run, step, metrics):
        run.log({"train/loss": 1.0})
"""


def with_callbacks(config, *names):
    return replace(config, callbacks=names)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_callbacks_log_save_stop_and_set_the_learning_rate_on_all_ranks(inputs, tmp_path, world_size):
    (tmp_path / "own.py").write_text(OWN)
    settings = {"checkpointing_enabled": True, "save_frequency": 100, "logging_steps": 100}
    config = make_config(inputs, tmp_path / "run", **settings)
    on_ranks(world_size, train, with_callbacks(config, f"{tmp_path}/own.py:Both"))
    rows = lines(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    rates = [row["train/learning_rate"] for row in rows[1:]]
    assert rates[2:] == [5e-4, 5e-4]
    assert 5e-4 not in rates[:2]
    # The hook reads the learning rate of the next step.
    assert rows[1]["own/rate"] == rates[1]
    assert lines(tmp_path / "run/saved.jsonl") == [[2, True], [4, True]]
    assert (tmp_path / "run/final-model").is_dir()
    shutil.rmtree(tmp_path / "run/final-model")
    for kept in (tmp_path / "run/checkpoints").iterdir():
        if kept.name != "step-00000002":
            shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
    on_ranks(world_size, train, config)
    resumed = lines(tmp_path / "run/metrics.jsonl")
    assert [row["train/learning_rate"] for row in resumed[3:]] == [5e-4] * (len(resumed) - 3)
    assert resumed[3]["train/loss"] == rows[3]["train/loss"]


@pytest.mark.slow
def test_a_stopped_run_is_finished_until_it_is_made_longer(inputs, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    settings = {"checkpointing_enabled": True, "save_frequency": 100, "logging_steps": 100}
    config = with_callbacks(make_config(inputs, tmp_path / "run", **settings), f"{tmp_path}/own.py:Both")
    on_ranks(1, train, config)
    assert find_resumption(config, 1).is_finished
    longer = make_config(inputs, tmp_path / "run", **settings, epochs=3)
    assert not find_resumption(longer, 1).is_finished
    # The run was killed while it wrote the final model: the same command ends at the step where the run was stopped.
    (tmp_path / "run/checkpoints/step-00000004/finished").unlink()
    shutil.rmtree(tmp_path / "run/final-model")
    on_ranks(1, train, config)
    assert lines(tmp_path / "run/metrics.jsonl")[-1]["step"] == 4
    assert (tmp_path / "run/final-model").is_dir()
    on_ranks(1, train, longer)
    assert lines(tmp_path / "run/metrics.jsonl")[-1]["step"] > 4


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stop_at_a_checkpoint_ends_the_run_after_the_next_step_which_is_evaluated_and_saved(
    inputs, tmp_path, world_size
):
    (tmp_path / "own.py").write_text(OWN)
    settings = {"checkpointing_enabled": True, "save_frequency": 2, "logging_steps": 100}
    config = make_config(inputs, tmp_path / "run", **settings)
    on_ranks(world_size, train, with_callbacks(config, f"{tmp_path}/own.py:AtCheckpoint"))
    rows = lines(tmp_path / "run/metrics.jsonl")
    assert [(row["step"], "eval/loss" in row) for row in rows[1:]] == [(1, False), (2, False), (3, True)]
    # The run was killed while it wrote the final model: it does not train on.
    (tmp_path / "run/checkpoints/step-00000003/finished").unlink()
    shutil.rmtree(tmp_path / "run/final-model")
    on_ranks(world_size, train, config)
    assert lines(tmp_path / "run/metrics.jsonl") == rows
    assert (tmp_path / "run/final-model").is_dir()


@pytest.mark.parametrize("name", ["Misspelt", "Nothing", "Needy", "Missing"])
def test_a_class_that_is_no_callback_is_refused_before_the_run(tmp_path, name):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ConfigError, match=name):
        load_callback(f"{tmp_path}/own.py:{name}")


def test_a_name_that_the_run_writes_itself_is_refused(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    control = RunControl(tmp_path, schedule=None, saves_checkpoints=False)
    callbacks = Callbacks([f"{tmp_path}/own.py:AtCheckpoint"], control)
    for name in ("train/loss", "step"):
        control.log({name: 1.0})
        with pytest.raises(ConfigError, match=name):
            callbacks.take_logged({"train/loss": 2.0})


@pytest.mark.slow
def test_a_wrong_request_ends_the_run_with_the_name_of_the_argument(inputs, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    config = with_callbacks(make_config(inputs, tmp_path / "run"), f"{tmp_path}/own.py:Clash")
    with pytest.raises(AssertionError, match=r"Error: .*train/loss"):
        on_ranks(1, train, config)
    config = with_callbacks(make_config(inputs, tmp_path / "unsaved"), f"{tmp_path}/own.py:Both")
    with pytest.raises(AssertionError, match=r"Error: .*checkpointing_enabled"):
        on_ranks(1, train, config)
