"""Tests for the qualification of a GPU machine that run without a GPU."""

import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks/gpu"
sys.path.append(str(FOLDER))
import qualify  # noqa: E402
from qualify import STEPS, Expected, Step  # noqa: E402

SCRIPT = FOLDER / "qualify.py"
on_cpu = pytest.mark.skipif(bool(qualify.gpus()), reason="rehearsals are for machines without a GPU")


def run(*words, timeout_s=60):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=timeout_s
    )


def test_the_plan_names_every_step_and_has_most_of_it_in_the_first_ten_minutes_of_one_gpu():
    printed = run("--plan").stdout
    for step in STEPS:
        assert f"{step.name}: {step.what}" in printed
        assert all(f"    {expected.figure}: " in printed for expected in step.expected)
    assert STEPS[0].name == "first"
    assert STEPS[0].limit_s <= 10 * 60
    assert sum(step.limit_s for step in STEPS if step.min_gpus == 1) <= 44 * 60


def test_engine_checks_run_on_both_model_runners():
    calls = {runner: {step.call for step in STEPS if step.runner == runner} for runner in (1, 2)}
    assert calls[1] == calls[2] >= {"gpu_engine:gap_fp32", "gpu_engine:swaps"}
    assert len({step.name for step in STEPS}) == len(STEPS)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_step_has_a_function(step):
    module, _, function = step.call.partition(":")
    assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize(
    ("bounds", "value", "verdict"),
    [
        ({"at_most": 1}, 0.5, "ok"),
        ({"at_most": 1}, 1.5, "out of bounds"),
        ({"at_most": 1}, float("nan"), "out of bounds"),
        ({"at_most": 1}, "out of memory", "wrong"),
        ({"at_least": 1}, 0.5, "out of bounds"),
        ({}, True, "ok"),
        ({}, False, "wrong"),
        ({}, None, "missing"),
        ({"predicted": 1}, "out of memory", "noted"),
    ],
)
def test_a_figure_is_judged_by_its_bounds(bounds, value, verdict):
    assert qualify.verdict(Expected(figure="x", **bounds), value) == verdict


SLOW = {"TB/s": 0.9, "GB/s": 12.0, "s": 250.0}
"""Speeds that are out of bounds on an H200, by unit."""


@pytest.mark.parametrize(
    ("name", "is_judged"),
    [("NVIDIA H200", True), ("NVIDIA GH200 480GB", False), ("NVIDIA GeForce RTX 4090", False)],
)
def test_speeds_are_judged_only_on_the_gpu_of_their_bounds(monkeypatch, name, is_judged):
    device = qualify.Gpu(name, "580.1", 24_000, 0)
    monkeypatch.setattr(qualify, "gpus", lambda: [device])
    timed = [step for step in STEPS if step.name in ("first", "ceilings", "swap", "train", "ranks_2")]
    for step in timed:
        speeds = {
            expected.figure: SLOW[expected.figure.rpartition(", ")[2]]
            for expected in step.expected
            if expected.figure.rpartition(", ")[2] in SLOW
        }
        monkeypatch.setattr(qualify, "run_step", lambda *_, speeds=speeds: (dict(speeds), "", ""))
        words = {
            row["figure"]: row["verdict"] for row in qualify.rows_of(step, True, [device] * step.min_gpus)
        }
        assert ("out of bounds" in {words[figure] for figure in speeds}) == is_judged


@pytest.fixture
def found(monkeypatch):
    """Put this file on the import path of the processes that run steps."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


def crash(bench):
    bench.note("x", 0.25)
    raise RuntimeError("the device is on fire")


def hang(bench):
    time.sleep(600)


@pytest.mark.slow
@on_cpu
def test_a_crash_keeps_the_figures_before_it_and_shows_its_last_words(found):
    step = Step(name="crash", call="test_qualify:crash", limit_s=60)
    figures, problem, output = qualify.run_step(step, False, 0)
    assert (figures, problem) == ({"x": 0.25}, "1")
    assert "the device is on fire" in output


@on_cpu
@pytest.mark.slow
def test_a_step_that_hangs_is_ended_and_explained(found, capsys):
    expected = (Expected(figure="x", at_most=1, means="the cooling"),)
    step = Step(name="hang", call="test_qualify:hang", limit_s=3, expected=expected)
    assert [row["verdict"] for row in qualify.rows_of(step, False, [])] == ["missing", "wrong"]
    assert "look at: the cooling" in capsys.readouterr().out


@on_cpu
@pytest.mark.slow
def test_a_step_rehearses_on_cpu():
    printed = run("--device", "cpu", "--only", "corrupt", timeout_s=600)
    assert printed.returncode == 0, printed.stdout + printed.stderr
    assert "corrupted row noticed: True" in printed.stdout
    assert "all as expected" in printed.stdout
