"""Pictures of runs: their curves, alone or side by side, and the gap between the engine's and the trainer's numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from vectorlm.errors import ConfigError
from vectorlm.report.runs import RunFolder, Series, differences, names_of, read_lines
from vectorlm.report.style import COLOURS, LINES, draw, finish, head, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Panel(NamedTuple):
    """A few metrics that belong in one picture."""

    title: str
    look_for: str
    unit: str
    curves: dict[str, str]
    """Labels by metric."""
    shares: bool = False
    """The values are shares, from 0 to 1."""
    divisor: float = 1.0
    from_zero: bool = False
    """The axis begins at 0, so that a wobble looks like one."""
    always_named: bool = False
    """A single curve gets a legend too."""


PANELS = (
    Panel(
        "Loss",
        "should fall; held out rising again is overfitting",
        "nats per token",
        {"train/loss": "train", "eval/loss": "held out"},
    ),
    Panel("Reward", "should rise, noisily", "mean of the completions", {"reward/mean": "sampled"}),
    Panel(
        "Right answers",
        "should rise with the reward or as the loss falls",
        "share of held-out questions",
        {"eval/accuracy": "held out"},
        shares=True,
    ),
    Panel(
        "KL divergence",
        "small and steady; a jump comes before a collapse",
        "nats per token",
        {
            "policy/kl": "from the rollouts' policy",
            "reference/kl": "from the reference",
            "teacher/kl": "from the teacher",
        },
        always_named=True,
    ),
    Panel(
        "Entropy", "falls slowly; near 0 nothing new is tried", "nats per token", {"policy/entropy": "policy"}
    ),
    Panel(
        "Length of completions",
        "a climb to the limit means endless answers",
        "tokens",
        {"completion/length_mean": "mean", "completion/length_max": "longest"},
        from_zero=True,
    ),
    Panel(
        "What teaches little",
        "near 100% nothing is learned",
        "share",
        {
            "reward/constant_groups": "groups with equal rewards",
            "completion/truncated": "truncated completions",
            "policy/clip_fraction": "clipped tokens",
        },
        shares=True,
    ),
    Panel(
        "Gradient norm",
        "before clipping; look at the data of a spike",
        "norm",
        {"train/grad_norm": "model", "policy/grad_norm": "policy", "critic/grad_norm": "critic"},
        from_zero=True,
    ),
    Panel(
        "Learning rate",
        "as the schedule says",
        "learning rate",
        {"train/learning_rate": "model", "policy/learning_rate": "policy", "critic/learning_rate": "critic"},
    ),
    Panel(
        "Throughput",
        "should be flat; dips are other work on the machine",
        "tokens per second",
        {"train/tokens_per_s": "trained", "perf/tokens_per_s": "sampled and trained"},
        from_zero=True,
    ),
    Panel(
        "Memory of a rank",
        "should be flat; an endless climb is a leak",
        "GiB",
        {"perf/memory_max_bytes": "rank"},
        divisor=2.0**30,
        from_zero=True,
    ),
)


def plot_run(metrics_path: str | Path, output_png: str | Path, title: str | None = None) -> bool:
    """Draw the curves of a run over its steps; panels without data are left out.

    Args:
        metrics_path: Its ``metrics.jsonl``.
        output_png: The picture.
        title: The name of the run's folder when omitted.

    Returns:
        Whether there was anything to draw; else there is no picture.
    """
    run = RunFolder(Path(metrics_path).parent)
    panels = filled_panels([run])
    if not panels:
        return False
    figure, grid = new_figure(len(panels), title or run.name)
    for axes, panel in zip(grid, panels, strict=True):
        head(axes, panel.title, panel.look_for, xlabel="step", ylabel=panel.unit)
        for colour, (label, points) in zip(COLOURS, _curves(run, panel), strict=False):
            draw(axes, points, label, color=colour)
            if panel.title == "Right answers":
                _annotate_last(axes, points)
        _finish_steps(axes, panel, with_legend=len(panel.curves) > 1 or panel.always_named)
    save(figure, Path(output_png))
    return True


def plot_runs(runs: Sequence[RunFolder], metrics: Sequence[str], output_png: Path) -> None:
    """Draw runs over each other, a colour each, and name the settings that differ.

    Args:
        runs: At least one.
        metrics: A panel for each; when empty, the panels of `plot_run`.
        output_png: The picture.

    Raises:
        ConfigError: No run has logged a metric of this name, or any at all.
    """
    panels = [metric_panel(name, runs) for name in metrics] or filled_panels(runs)
    if not panels:
        raise ConfigError(f"{', '.join(names_of(runs))} logged nothing to draw. Wait for the first step.")
    names = names_of(runs)
    figure, grid = new_figure(len(panels), " and ".join(names) if len(names) < 4 else f"{len(names)} runs")
    for axes, panel in zip(grid, panels, strict=True):
        head(axes, panel.title, panel.look_for, xlabel="step", ylabel=panel.unit)
        used: dict[str, str] = {}
        for index, run in enumerate(runs):
            for label, points in _curves(run, panel):
                line = used.setdefault(label, LINES[len(used) % len(LINES)])
                draw(axes, points, label, color=COLOURS[index % len(COLOURS)], linestyle=line)
        _finish_steps(axes, panel, with_legend=False)
        if len(used) > 1:
            _explain_lines(axes, used)
    _name_runs(figure, names, differences(runs))
    save(figure, output_png)


def filled_panels(runs: Sequence[RunFolder]) -> list[Panel]:
    """Return the panels that some run has data for, without the curves that none has."""
    logged = {name for run in runs for name in run.metric_names}
    found = [
        panel._replace(curves={name: label for name, label in panel.curves.items() if name in logged})
        for panel in PANELS
    ]
    return [panel for panel in found if panel.curves]


def metric_panel(name: str, runs: Sequence[RunFolder]) -> Panel:
    """Return a panel of one metric, which some run must have logged."""
    logged = sorted({each for run in runs for each in run.metric_names})
    if name not in logged:
        raise ConfigError(f"metric {name!r} was not logged: it must be one of {', '.join(logged)}.")
    return Panel(name, "", "", {name: name.rpartition("/")[2]})


def _curves(run: RunFolder, panel: Panel) -> list[tuple[str, Series]]:
    found = [(label, run.series(name)) for name, label in panel.curves.items()]
    return [(label, [(step, y / panel.divisor) for step, y in points]) for label, points in found if points]


def _annotate_last(axes: Axes, points: Series) -> None:
    step, last = points[-1]
    if math.isfinite(last):
        axes.annotate(f"{last:.0%}", (step, last), (0, 6), textcoords="offset points", ha="right", fontsize=9)


def _finish_steps(axes: Axes, panel: Panel, with_legend: bool) -> None:
    finish(axes, shares=panel.shares, with_legend=with_legend)
    axes.locator_params(axis="x", integer=True)
    if panel.from_zero:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _explain_lines(axes: Axes, lines: dict[str, str]) -> None:
    from matplotlib.lines import Line2D

    styles: list[Any] = [{"label": label, "linestyle": line} for label, line in lines.items()]
    handles = [Line2D([], [], color="#666666", **style) for style in styles]
    axes.legend(handles=handles, frameon=False, fontsize=8)


def _name_runs(figure: Figure, names: Sequence[str], differing: dict[str, list[Any]]) -> None:
    """Write the legend of the runs below the panels, each with the settings that it does not share."""
    from matplotlib.lines import Line2D

    labels = []
    for index, name in enumerate(names):
        shown = [f"{path.rpartition('.')[2]}={values[index]}" for path, values in differing.items()]
        text = ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
        labels.append(f"{name}: {text}" if text else name)
    handles = [
        Line2D(
            [],
            [],
            color=COLOURS[index % len(COLOURS)],
            linewidth=2.5,
            label=shorten(label, 150, placeholder="…"),
        )
        for index, label in enumerate(labels)
    ]
    figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=9)


def plot_correction(
    metrics_path: str | Path, drift_path: str | Path, output_png: str | Path, band: tuple[float, float]
) -> bool:
    """Draw how far the engine's probabilities are from the trainer's, from ``metrics.jsonl`` and ``correction.jsonl``.

    Four panels: the log-ratios of the first and the last tenth of the steps, the effective sample size over the steps,
    the share of tokens with a ratio outside `band` by their place in a completion, and the gap of log-probabilities
    over the steps. Those without data are left out.

    Returns:
        Whether there was anything to draw; else there is no picture.
    """
    run, drift = RunFolder(Path(metrics_path).parent), list(read_lines(Path(drift_path)))
    has_ess, has_gap = "correction/ess" in run.metric_names, "sampler/logprob_gap_mean" in run.metric_names
    asked = [
        (_draw_ratios, bool(drift)),
        (_draw_size, has_ess),
        (_draw_places, bool(drift)),
        (_draw_gap, has_gap),
    ]
    drawn = [draw_panel for draw_panel, has_data in asked if has_data]
    if not drawn:
        return False
    figure, grid = new_figure(len(drawn), f"{run.name}: engine and trainer")
    for axes, draw_panel in zip(grid, drawn, strict=True):
        draw_panel(axes, run, drift, band)
    save(figure, Path(output_png))
    return True


def _draw_ratios(axes: Axes, run: RunFolder, drift: list[dict[str, Any]], band: tuple[float, float]) -> None:
    labels = {"xlabel": "log(trainer's / engine's probability) of a token", "ylabel": "share of tokens"}
    head(axes, "Ratio of probabilities", "healthy is one narrow peak at 0, within the dotted band", **labels)
    tenth, smallest, reach = max(len(drift) // 10, 1), 1.0, 0.1
    for part, label, colour, fill in (
        (drift[:tenth], "first steps", COLOURS[0], True),
        (drift[-tenth:], "last steps", COLOURS[3], False),
    ):
        counts = [sum(column) for column in zip(*(line["histogram"] for line in part), strict=True)]
        if not sum(counts):
            continue
        low, high = part[0]["lowest"], part[0]["highest"]
        edges = [low + (high - low) * index / len(counts) for index in range(len(counts) + 1)]
        shares = [count / sum(counts) for count in counts]
        style: Any = {"fill": True, "alpha": 0.35} if fill else {"linewidth": 1.6}
        # Bars on a logarithmic axis stand on something above 0.
        axes.stairs(shares, edges, baseline=1e-9, label=label, color=colour, **style)
        smallest = min(smallest, *(share for share in shares if share))
        for left, right, share in zip(edges, edges[1:], shares, strict=False):
            if share:
                reach = max(reach, abs(left), abs(right))
    bounds = [math.log(bound) for bound in band if bound > 0]
    for bound in bounds:
        axes.axvline(bound, color="#666666", linewidth=1, linestyle=":")
    # Beside the band there is room for the legend.
    reach = 2.4 * max([reach, *map(abs, bounds)])
    # Whatever was found, the axis spans four decades at least: else a healthy peak has an axis from 0.46 to 0.55.
    axes.set(yscale="log", xlim=(-reach, reach), ylim=(min(1e-4, smallest / 2), 1.6))
    finish(axes, with_legend=True)


def _draw_size(axes: Axes, run: RunFolder, drift: list[dict[str, Any]], band: tuple[float, float]) -> None:
    labels = {"xlabel": "step", "ylabel": "share of what was sampled"}
    head(axes, "Effective sample size", "100% where engine and trainer agree", **labels)
    for index, (name, label) in enumerate({"ess": "tokens", "ess_sequences": "completions"}.items()):
        if points := run.series(f"correction/{name}"):
            # Two curves at 100% lie on each other.
            draw(axes, points, label, color=COLOURS[index], linestyle=LINES[index])
    finish(axes, shares=True, with_legend=True)
    axes.locator_params(axis="x", integer=True)


def _draw_places(axes: Axes, run: RunFolder, drift: list[dict[str, Any]], band: tuple[float, float]) -> None:
    tokens: dict[int, int] = {}
    outside: dict[int, int] = {}
    for line in drift:
        for index, (count, beyond) in enumerate(zip(line["tokens"], line["out_of_band"], strict=True)):
            place = index * line["tokens_per_place"]
            tokens[place] = tokens.get(place, 0) + count
            outside[place] = outside.get(place, 0) + beyond
    points: Series = [(place, outside[place] / count) for place, count in sorted(tokens.items()) if count]
    num_outside, title = sum(outside.values()), f"Tokens with a ratio outside {band[0]:g} to {band[1]:g}"
    found = "none of all steps"
    if num_outside:
        found = f"{num_outside:,} of {sum(tokens.values()):,}; rising to the right: errors add up"
    head(axes, title, found, xlabel="token of the completion", ylabel="share of tokens")
    draw(axes, points, "all steps", color=COLOURS[4])
    finish(axes)
    axes.set_ylim(0, max(0.01, *(1.1 * share for _, share in points)) if points else 0.01)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")


def _draw_gap(axes: Axes, run: RunFolder, drift: list[dict[str, Any]], band: tuple[float, float]) -> None:
    labels = {"xlabel": "step", "ylabel": "nats"}
    head(axes, "Gap of log-probabilities", "should be flat; a climb means stale or broken weights", **labels)
    is_positive = False
    for index, (name, label) in enumerate({"mean": "mean", "max": "largest"}.items()):
        if points := run.series(f"sampler/logprob_gap_{name}"):
            draw(axes, points, label, color=COLOURS[index])
            is_positive |= any(value > 0 for _, value in points)
    if is_positive:
        axes.set_yscale("log")
    finish(axes, with_legend=True)
    axes.locator_params(axis="x", integer=True)
