"""The picture of a run is drawn from whatever the run logged."""

import json
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from vectorlm.telemetry.metrics import JsonlSink
from vectorlm.telemetry.plots import plot_correction, plot_run


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[float, float]]]:
    """Collect what is drawn, by panel title and label, while drawing it."""
    series: dict[str, list[tuple[float, float]]] = {}
    plot, text = Axes.plot, Axes.text

    def note_plot(axes: Axes, steps: tuple, values: tuple, **style: object) -> object:
        series[f"{axes.get_title()}: {style['label']}"] = list(zip(steps, values, strict=True))
        return plot(axes, steps, values, **style)

    def note_text(axes: Axes, x: float, y: float, words: str, **style: object) -> object:
        series[f"{axes.get_title()}: {words}"] = []
        return text(axes, x, y, words, **style)

    monkeypatch.setattr(Axes, "plot", note_plot)
    monkeypatch.setattr(Axes, "text", note_text)
    return series


def test_losses_and_share_of_right_answers_are_drawn_over_steps(
    tmp_path: Path, drawn: dict[str, list[tuple[float, float]]]
) -> None:
    with JsonlSink(tmp_path / "metrics.jsonl") as sink:
        sink.write(10, {"train/loss": 2.0})
        sink.write(20, {"train/loss": 1.0, "eval/loss": 1.25, "eval/accuracy": 0.25})
        sink.write(40, {"eval/loss": 1.0, "eval/accuracy": 0.75})
    plot_run(tmp_path / "metrics.jsonl", tmp_path / "pictures" / "run.png")
    assert drawn == {
        "Loss: train": [(10, 2.0), (20, 1.0)],
        "Loss: held out": [(20, 1.25), (40, 1.0)],
        "Right answers: held out": [(20, 0.25), (40, 0.75)],
    }
    height, width, _ = imread(tmp_path / "pictures" / "run.png").shape
    assert (height, width) == (504, 1320)


def test_a_panel_without_data_says_so_and_a_null_is_a_gap(
    tmp_path: Path, drawn: dict[str, list[tuple[float, float]]]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 2.0}\n{"step": 2, "train/loss": null}\n{"step": 3, "train/loss": 1.0}\n'
    )
    plot_run(tmp_path / "metrics.jsonl", tmp_path / "run.png", title="a run")
    steps, values = zip(*drawn["Loss: train"], strict=True)
    assert steps == (1, 2, 3)
    assert str(values) == "(2.0, nan, 1.0)"
    assert "Right answers: not logged" in drawn
    assert (tmp_path / "run.png").stat().st_size > 0


def test_a_run_that_logged_nothing_still_gives_a_picture(
    tmp_path: Path, drawn: dict[str, list[tuple[float, float]]]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    plot_run(tmp_path / "metrics.jsonl", tmp_path / "run.png")
    assert drawn == {"Loss: not logged": [], "Right answers: not logged": []}


def test_the_distance_of_engine_and_trainer_is_drawn_in_four_panels(
    tmp_path: Path, drawn: dict[str, list[tuple[float, float]]]
) -> None:
    with JsonlSink(tmp_path / "metrics.jsonl") as sink:
        for step, ess in ((1, 1.0), (2, 0.5)):
            sink.write(
                step,
                {
                    "correction/ess": ess,
                    "correction/ess_sequences": ess / 2,
                    "sampler/logprob_gap_mean": 0.1 * step,
                    "sampler/logprob_gap_max": 0.2 * step,
                },
            )
    places = {"tokens_per_place": 2, "tokens": [4, 2], "out_of_band": [1, 2]}
    line = {"lowest": -2.0, "highest": 2.0, "histogram": [0, 5, 1, 0], **places}
    (tmp_path / "drift.jsonl").write_text(f"{json.dumps(line)}\n" * 2)
    plot_correction(tmp_path / "metrics.jsonl", tmp_path / "drift.jsonl", tmp_path / "out.png", (0.5, 2.0))
    assert drawn == {
        "Effective sample size: tokens": [(1, 1.0), (2, 0.5)],
        "Effective sample size: completions": [(1, 0.5), (2, 0.25)],
        "Tokens with a ratio outside 0.5 to 2: all steps": [(0, 0.25), (2, 1.0)],
        "Gap of log-probabilities: mean": [(1, 0.1), (2, 0.2)],
        "Gap of log-probabilities: largest": [(1, 0.2), (2, 0.4)],
    }
    assert imread(tmp_path / "out.png").shape[:2] == (912, 1320)


def test_a_run_that_never_compared_them_still_gives_a_picture(
    tmp_path: Path, drawn: dict[str, list[tuple[float, float]]]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    plot_correction(tmp_path / "metrics.jsonl", tmp_path / "drift.jsonl", tmp_path / "out.png", (0.5, 2.0))
    assert len(drawn) == 4
    assert all(name.endswith("not logged") for name in drawn)
