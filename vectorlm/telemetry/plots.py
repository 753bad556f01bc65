"""Pictures of a run: loss or reward, accuracy, and the gap between the engine's and the trainer's probabilities."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = list[tuple[int, float]]


def plot_run(metrics_path: str | Path, output_png: str | Path, title: str | None = None) -> None:
    """Draw the loss (or the reward, with reinforcement learning) and the accuracy of a run over its steps.

    A panel without data says so; a value that was not finite leaves a gap. `title` is the name of the run's folder when
    omitted.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no display needed

    metrics_path, output_png = Path(metrics_path), Path(output_png)
    lines = _read(metrics_path)
    figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
    figure.suptitle(title or metrics_path.resolve().parent.name, fontsize=13, fontweight="bold")
    loss, share = figure.subplots(1, 2, sharex=True)
    reward = _series(lines, "reward/mean")
    if reward:
        _draw_reward(loss, reward)
    else:
        _draw_loss(loss, _series(lines, "train/loss"), _series(lines, "eval/loss"))
    _draw_share(share, _series(lines, "eval/accuracy"))
    output_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output_png)


def plot_correction(
    metrics_path: str | Path, drift_path: str | Path, output_png: str | Path, band: tuple[float, float]
) -> None:
    """Draw how far the engine's probabilities are from the trainer's, from ``metrics.jsonl`` and ``correction.jsonl``.

    Four panels: the log-ratios of the first and the last tenth of the steps, the effective sample size over the steps,
    the share of tokens with a ratio outside `band` by their place in a completion, and the gap of log-probabilities
    over the steps. A panel without data says so.
    """
    from matplotlib.figure import Figure

    metrics_path, drift_path, output_png = Path(metrics_path), Path(drift_path), Path(output_png)
    lines, drift = _read(metrics_path), _read(drift_path) if drift_path.exists() else []
    figure = Figure(figsize=(11, 7.6), dpi=120, layout="constrained")
    name = metrics_path.resolve().parent.name
    figure.suptitle(f"{name}: engine and trainer", fontsize=13, fontweight="bold")
    (ratios, size), (places, gap) = figure.subplots(2, 2)
    _draw_ratios(ratios, drift, band)
    size.set(
        title="Effective sample size", xlabel="step", ylabel="share of what was sampled", ylim=(-0.03, 1.03)
    )
    tokens = _series(lines, "correction/ess")
    _draw_series(size, tokens, "tokens", color="tab:blue")
    _draw_series(size, _series(lines, "correction/ess_sequences"), "completions", color="tab:orange")
    _finish(size, has_data=bool(tokens))
    _draw_places(places, drift, band)
    gap.set(title="Gap of log-probabilities", xlabel="step", ylabel="nats")
    mean, largest = _series(lines, "sampler/logprob_gap_mean"), _series(lines, "sampler/logprob_gap_max")
    _draw_series(gap, mean, "mean", color="tab:blue")
    _draw_series(gap, largest, "largest", color="tab:orange")
    if any(value > 0 for _, value in mean):
        gap.set_yscale("log")
    _finish(gap, has_data=bool(mean))
    output_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output_png)


def _draw_ratios(axes: Axes, drift: list[dict[str, Any]], band: tuple[float, float]) -> None:
    axes.set(title="Log-ratios trainer / engine", xlabel="log ratio of a token", ylabel="share of tokens")
    tenth = max(len(drift) // 10, 1)
    for part, label, colour in (
        (drift[:tenth], "first tenth", "tab:blue"),
        (drift[-tenth:], "last tenth", "tab:red"),
    ):
        counts = [sum(column) for column in zip(*(line["histogram"] for line in part), strict=True)]
        if sum(counts):
            low, high = part[0]["lowest"], part[0]["highest"]
            edges = [low + (high - low) * index / len(counts) for index in range(len(counts) + 1)]
            axes.stairs([count / sum(counts) for count in counts], edges, label=label, color=colour)
    if drift:
        axes.set_yscale("log")
        for bound in band:
            if bound > 0:
                axes.axvline(math.log(bound), color="grey", linewidth=0.8, linestyle=":")
    _finish(axes, has_data=bool(drift))


def _draw_places(axes: Axes, drift: list[dict[str, Any]], band: tuple[float, float]) -> None:
    axes.set(
        title=f"Tokens with a ratio outside {band[0]:g} to {band[1]:g}",
        xlabel="token of the completion",
        ylabel="share",
    )
    tokens: dict[int, int] = {}
    outside: dict[int, int] = {}
    for line in drift:
        for index, (count, beyond) in enumerate(zip(line["tokens"], line["out_of_band"], strict=True)):
            place = index * line["tokens_per_place"]
            tokens[place] = tokens.get(place, 0) + count
            outside[place] = outside.get(place, 0) + beyond
    series = [(place, outside[place] / count) for place, count in sorted(tokens.items()) if count]
    _draw_series(axes, series, "all steps", color="tab:purple")
    axes.set_ylim(bottom=0)
    _finish(axes, has_data=bool(series))


def _read(metrics_path: Path) -> list[dict[str, Any]]:
    lines = metrics_path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _series(lines: list[dict[str, Any]], name: str) -> Series:
    values = {line["step"]: line[name] for line in lines if name in line}
    return [(step, math.nan if value is None else value) for step, value in sorted(values.items())]


def _draw_loss(axes: Axes, train: Series, evaluation: Series) -> None:
    axes.set(title="Loss", xlabel="optimizer step", ylabel="cross-entropy (nats per token)")
    _draw_series(axes, train, "train", color="tab:blue", linewidth=1.2, alpha=0.75)
    _draw_series(axes, evaluation, "held out", color="tab:orange", linewidth=1.8)
    _finish(axes, has_data=bool(train or evaluation))


def _draw_reward(axes: Axes, reward: Series) -> None:
    axes.set(title="Reward", xlabel="step", ylabel="mean over the sampled completions")
    _draw_series(axes, reward, "sampled", color="tab:blue", linewidth=1.2, alpha=0.75)
    _finish(axes, has_data=True)


def _draw_share(axes: Axes, accuracy: Series) -> None:
    axes.set(title="Right answers", xlabel="optimizer step", ylabel="share of held-out questions")
    _draw_series(axes, accuracy, "held out", color="tab:green", linewidth=1.8)
    if accuracy and math.isfinite(accuracy[-1][1]):
        step, last = accuracy[-1]
        axes.annotate(f"{last:.0%}", (step, last), (6, 0), textcoords="offset points", va="center")
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _finish(axes, has_data=bool(accuracy))


def _draw_series(axes: Axes, series: Series, label: str, **style: Any) -> None:
    if series:
        marker = "o" if len(series) <= 40 else ""  # a single point, or one between two gaps, has no line
        axes.plot(*zip(*series, strict=True), label=label, marker=marker, markersize=4.5, **style)


def _finish(axes: Axes, has_data: bool) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.locator_params(axis="x", integer=True)
    if has_data:
        axes.legend(frameon=False)
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="grey")
