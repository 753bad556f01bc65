"""Figures of runs, drawn from any metrics that the runs logged."""

import json
import math

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from vectorlm.cli.watch import frame
from vectorlm.errors import ConfigError
from vectorlm.report.metrics import JsonlSink
from vectorlm.report.plots import last_steps, plot_correction, plot_runs, plot_timeline
from vectorlm.report.runs import RunFolder
from vectorlm.report.step_lines import Timeline

HEALTHY = {
    "lowest": -2.0,
    "highest": 2.0,
    "histogram": [0, 46, 54, 0],
    "tokens_per_place": 2,
    "tokens": [60, 40],
    "out_of_band": [0, 0],
}


@pytest.fixture
def figures(monkeypatch):
    """Return a list that collects every figure that is saved."""
    kept, save = [], Figure.savefig

    def note(figure, path):
        kept.append(figure)
        save(figure, path)

    monkeypatch.setattr(Figure, "savefig", note)
    return kept


def panels(figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def curves(figure):
    """Return the curves by panel title and label."""
    return {
        f"{title}: {line.get_label()}": list(zip(*line.get_data(), strict=True))
        for title, axes in panels(figure).items()
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def write_run(folder, *lines):
    with JsonlSink(folder / "metrics.jsonl") as sink:
        for step, values in lines:
            sink.write(step, values)
    return RunFolder(folder)


def test_losses_and_share_of_right_answers_are_drawn_over_steps(tmp_path, figures):
    run = write_run(
        tmp_path,
        (10, {"train/loss": 2.0}),
        (20, {"train/loss": 1.0, "eval/loss": 1.25, "eval/accuracy": 0.25}),
        (30, {"eval/accuracy": 0.75}),
        (40, {"eval/loss": 1.0, "eval/accuracy": 0.5}),
    )
    assert plot_runs([run], tmp_path / "pictures" / "run.png")
    assert curves(figures[0]) == {
        "Loss: train": [(10, 2.0), (20, 1.0)],
        "Loss: held out": [(20, 1.25), (40, 1.0)],
        "Right answers: held out": [(20, 0.25), (30, 0.75), (40, 0.5)],
    }
    assert [text.get_text() for text in panels(figures[0])["Right answers"].texts][-2:] == ["best 75%", "50%"]
    assert imread(tmp_path / "pictures" / "run.png").shape[:2] == (432, 1056)


def test_rewards_by_name_and_source_are_drawn_where_there_are_several(tmp_path, figures):
    metrics = {"reward/mean": 0.5, "reward/length/mean": 0.2, "reward/length/std": 0.1}
    alone = write_run(tmp_path / "alone", *((step, metrics) for step in range(3)))
    more = {"reward/right/mean": 0.8, "source/a/reward/mean": 0.1, "source/b/reward/mean": 0.3}
    more["source/a/reward/length/mean"] = 0.4
    several = write_run(tmp_path / "several", *((step, metrics | more) for step in range(3)))
    plot_runs([alone], tmp_path / "alone.png")
    plot_runs([several], tmp_path / "several.png")
    assert list(panels(figures[0])) == ["Reward"]
    drawn = curves(figures[1])
    assert {name: points[0][1] for name, points in drawn.items()} == {
        "Reward: sampled": 0.5,
        "Rewards by name: length": 0.2,
        "Rewards by name: right": 0.8,
        "Rewards by source: a": 0.1,
        "Rewards by source: b": 0.3,
    }
    shown = frame(several, 100, 40)
    assert any("reward/right/mean" in line.plain for line in shown)


def test_a_value_that_is_null_is_a_gap(tmp_path, figures):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 2.0}\n{"step": 2, "train/loss": null}\n{"step": 3, "train/loss": 1.0}\n'
    )
    plot_runs([RunFolder(tmp_path)], tmp_path / "run.png")
    ((_, points),) = curves(figures[0]).items()
    assert [step for step, _ in points] == [1, 2, 3]
    assert math.isnan(points[1][1])


def test_a_run_that_logged_nothing_gives_no_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    run = RunFolder(tmp_path)
    assert not plot_runs([run], tmp_path / "run.png")
    assert not plot_correction(run, tmp_path / "no.jsonl", tmp_path / "run.png", (0.5, 2.0))
    plot_timeline(tmp_path / "no.jsonl", tmp_path / "run.png")
    assert not (tmp_path / "run.png").exists()


def healthy_run(folder):
    """Return a run whose engine and trainer agree except for rounding, and its drift file."""
    values = {"correction/ess": 1.0, "correction/ess_sequences": 1.0}
    values |= {"sampler/logprob_gap_mean": 1.1e-7, "sampler/logprob_gap_max": 1.2e-7}
    run = write_run(folder, (1, values), (2, values))
    (folder / "drift.jsonl").write_text(f"{json.dumps(HEALTHY)}\n" * 2)
    return run, folder / "drift.jsonl"


def test_tokens_out_of_band_are_drawn_by_their_place(tmp_path, figures):
    run, drift = healthy_run(tmp_path)
    drift.write_text(f"{json.dumps({**HEALTHY, 'out_of_band': [15, 40]})}\n" * 2)
    plot_correction(run, drift, tmp_path / "out.png", (0.5, 2.0))
    assert curves(figures[0])["Tokens with a ratio outside 0.5 to 2: all steps"] == [(0, 0.25), (2, 1.0)]
    assert figures[0].axes[2].get_ylim()[1] > 1


def two_runs(tmp_path):
    for name, lr, loss in (("slow", "1.0e-4", 2.0), ("fast", "1.0e-3", 1.0)):
        (tmp_path / name).mkdir()
        write_run(
            tmp_path / name, (1, {"train/loss": loss, "eval/loss": loss}), (2, {"train/loss": loss / 2})
        )
        text = f"model: m\ntrain_parameters: {{output_dir: {name}, optimizer: {{lr: {lr}}}}}\n"
        (tmp_path / name / "config.yaml").write_text(text)
    return [RunFolder(tmp_path / "slow"), RunFolder(tmp_path / "fast")]


def test_runs_lie_over_each_other_with_the_settings_that_differ(tmp_path, figures):
    plot_runs(two_runs(tmp_path), tmp_path / "both.png")
    (axes,) = figures[0].axes
    colours = [line.get_color() for line in axes.lines]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--", "-", "--"]
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["slow: lr=0.0001", "fast: lr=0.001"]


def test_dollar_signs_in_names_and_values_are_no_formulas(tmp_path, figures):
    runs = []
    for name in (r"$\a{$", "plain"):
        (tmp_path / name).mkdir()
        rewards = {rf"reward/{name}$\b{{$/mean": 1.0, "reward/other/mean": 0.5}
        runs.append(write_run(tmp_path / name, (1, rewards)))
        (tmp_path / name / "config.yaml").write_text(f"text: '{name} $\\boxed{{}}$'\n")
    plot_runs(runs, tmp_path / "both.png")
    plot_runs(runs[:1], tmp_path / "one.png", runs[0].metric_names)
    (legend,) = figures[0].legends
    # This is what matplotlib draws.
    assert legend.get_texts()[0]._preprocess_math(legend.get_texts()[0].get_text()) == (
        r"$\a{$: text=$\a{$ $\boxed{}$",
        False,
    )


def test_chosen_metrics_get_a_panel_each_and_unknown_ones_are_named(tmp_path, figures):
    runs = two_runs(tmp_path)
    plot_runs(runs, tmp_path / "both.png", ["eval/loss"])
    assert list(panels(figures[0])) == ["eval/loss"]
    with pytest.raises(ConfigError, match="'train/los'"):
        plot_runs(runs, tmp_path / "both.png", ["train/los"])


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


def test_the_picture_ends_with_the_last_step_and_not_with_the_evaluation_after_it(tmp_path):
    timeline = Timeline(tmp_path / "timeline.jsonl")
    for step in range(1, 15):
        timeline.write(step, [*TRAINER, ("time/evaluate_s", 14.0, 30.0)], [(10.5, 13.0)])
    lines = last_steps(tmp_path / "timeline.jsonl")
    assert [line["train_step"] for line in lines] == list(range(3, 15))
    assert [name for name, *_ in lines[0]["trainer"]] == ["publish", "generate", "update", "evaluate"]
    assert [name for name, *_ in lines[-1]["trainer"]] == ["publish", "generate", "update"]


def test_a_timeline_begins_with_the_last_start_of_the_run(tmp_path):
    for first_step, last_step, seconds in ((0, 5, 9000.0), (4, 7, 0.0)):
        (tmp_path / "run.json").write_text(json.dumps({"first_step": first_step}))
        timeline = Timeline(tmp_path / "timeline.jsonl", first_step or None)
        for step in range(first_step + 1, last_step + 1):
            spans = [(name, seconds + start, seconds + end) for name, start, end in TRAINER]
            timeline.write(step, spans, [])
    lines = last_steps(tmp_path / "timeline.jsonl")
    assert [line["train_step"] for line in lines] == [5, 6, 7]
    plot_timeline(tmp_path / "timeline.jsonl", tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").is_file()
