"""Draw pictures of runs: metrics, engine and trainer compared, and the timeline."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from vectorlm.errors import ConfigError
from vectorlm.report.panels import (
    ALL_PANELS,
    COLOURS,
    GREY,
    LOGPROB_GAP,
    PANELS,
    PHASES,
    SAMPLE_SIZE,
    Panel,
    short,
)
from vectorlm.report.runs import START, RunFolder, Series, differences, names_of, read_lines, read_settings
from vectorlm.settings import nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = ("-", "--", ":", "-.")
"""Line styles of curves, if colours mean runs or curves may overlap."""
DIM = "#666666"
PANEL_WIDTH, PANEL_HEIGHT = 4.4, 3.1
"""Size of a panel in inches."""
NUM_STEPS = 12
"""Number of last steps in a timeline."""


def plot_runs(runs: Sequence[RunFolder], output_png: Path, metrics: Sequence[str] = ()) -> bool:
    """Draw the metrics of runs over their steps; the legend of several runs has the settings that differ.

    Args:
        runs: At least one run.
        output_png: The picture.
        metrics: One panel per metric; if empty, the `PANELS` with data.

    Returns:
        Whether there was data; without data there is no picture.

    Raises:
        ConfigError: No run has logged a metric of this name.
    """
    names = names_of(runs)
    panels = [metric_panel(name, runs) for name in metrics] or filled_panels(runs, PANELS)
    if not panels:
        return False
    title = " and ".join(names) if len(names) < 4 else f"{len(names)} runs"
    figure, grid = _new_figure(len(panels), title)
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel, runs)
    keys = []
    for index, name in enumerate(names):
        shown = [f"{path.rpartition('.')[2]}={values[index]}" for path, values in differences(runs).items()]
        more = [f"and {len(shown) - 6} more"] if len(shown) > 6 else []
        text = ": ".join([name, ", ".join(shown[:6] + more)] if shown else [name])
        keys.append(_key(shorten(text, 150, placeholder="…"), COLOURS[index % len(COLOURS)], "-"))
    if len(runs) > 1:
        figure.legend(handles=keys, loc="outside lower left", frameon=False, fontsize=9)
    _save(figure, output_png)
    return True


def filled_panels(runs: Sequence[RunFolder], panels: Sequence[Panel] = ALL_PANELS) -> list[Panel]:
    """Return the panels and curves with data in some run."""
    logged = sorted({name for run in runs for name in run.metric_names})
    found = []
    for panel in panels:
        curves = {name: label for name, label in panel.curves.items() if name in logged}
        matches = {name: match[1] for name in logged if (match := re.fullmatch(panel.pattern, name))}
        found.append(panel._replace(curves=matches if len(matches) > 1 else curves))
    return [panel for panel in found if panel.curves]


def metric_panel(name: str, runs: Sequence[RunFolder]) -> Panel:
    """Return a panel of one metric, which some run must have logged."""
    logged = sorted({logged for run in runs for logged in run.metric_names})
    if name not in logged:
        rule = f"was not logged: it must be one of {', '.join(logged)}."
        raise ConfigError(f"metric {name!r} {rule} {nearest(name, logged)}".rstrip())
    return Panel(name, "", "", {name: name.rpartition("/")[2]})


def plot_correction(run: RunFolder, drift_path: Path, output_png: Path, band: tuple[float, float]) -> bool:
    """Draw the difference of the engine's and the trainer's probabilities from ``metrics.jsonl`` and `drift_path`.

    The picture has four panels; panels without data are left out:

    - the log-ratios of the first and the last tenth of the steps
    - the effective sample size over the steps
    - the share of tokens with a ratio outside `band`, by their position in a completion
    - the gap of log-probabilities over the steps

    Returns:
        Whether there was data; without data there is no picture.
    """
    drift = list(read_lines(drift_path))
    size, gap = filled_panels([run], [SAMPLE_SIZE]), filled_panels([run], [LOGPROB_GAP])
    num_panels = len(size) + len(gap) + 2 * bool(drift)
    if not num_panels:
        return False
    figure, grid = _new_figure(num_panels, f"{run.name}: engine and trainer")
    places = iter(grid)
    if drift:
        _draw_ratios(next(places), drift, band)
    for panel in size:
        _draw_panel(next(places), panel, [run])
    if drift:
        _draw_places(next(places), drift, band)
    for panel in gap:
        _draw_panel(next(places), panel, [run])
    _save(figure, output_png)
    return True


def _draw_ratios(axes: Axes, drift: list[dict[str, Any]], band: tuple[float, float]) -> None:
    title, look_for = "Ratio of probabilities", "healthy is one narrow peak at 0, within the dotted band"
    _head(axes, title, look_for, "log(trainer's / engine's probability) of a token", "share of tokens")
    tenth, smallest, reach = max(len(drift) // 10, 1), 1.0, 0.1
    for part, label, colour, alpha in (
        (drift[:tenth], "first steps", COLOURS[0], 0.35),
        (drift[-tenth:], "last steps", COLOURS[3], None),
    ):
        counts = [sum(column) for column in zip(*(line["histogram"] for line in part), strict=True)]
        if not sum(counts):
            continue
        low, high = part[0]["lowest"], part[0]["highest"]
        edges = [low + (high - low) * index / len(counts) for index in range(len(counts) + 1)]
        shares = [count / sum(counts) for count in counts]
        # A logarithmic axis needs a baseline above 0.
        axes.stairs(
            shares,
            edges,
            baseline=1e-9,
            label=label,
            color=colour,
            fill=alpha is not None,
            alpha=alpha,
            linewidth=1.6,
        )
        smallest = min(smallest, *(share for share in shares if share))
        for left, right, share in zip(edges, edges[1:], shares, strict=False):
            if share:
                reach = max(reach, abs(left), abs(right))
    bounds = [math.log(bound) for bound in band if bound > 0]
    for bound in bounds:
        axes.axvline(bound, color=DIM, linewidth=1, linestyle=":")
    # Leave space for the legend next to the band.
    reach = 2.4 * max([reach, *map(abs, bounds)])
    _finish(axes)
    # The axis spans at least four decades: otherwise a healthy peak has an axis from 0.46 to 0.55.
    axes.set(yscale="log", xlim=(-reach, reach), ylim=(min(1e-4, smallest / 2), 1.6))
    axes.legend(frameon=False, fontsize=8)


def _draw_places(axes: Axes, drift: list[dict[str, Any]], band: tuple[float, float]) -> None:
    tokens: dict[int, int] = {}
    outside: dict[int, int] = {}
    for line in drift:
        for index, (count, beyond) in enumerate(zip(line["tokens"], line["out_of_band"], strict=True)):
            place = index * line["tokens_per_place"]
            tokens[place] = tokens.get(place, 0) + count
            outside[place] = outside.get(place, 0) + beyond
    points: Series = [(place, outside[place] / count) for place, count in sorted(tokens.items()) if count]
    found = "none of all steps"
    if num_outside := sum(outside.values()):
        found = f"{num_outside:,} of {sum(tokens.values()):,}; rising to the right: errors add up"
    title = f"Tokens with a ratio outside {band[0]:g} to {band[1]:g}"
    _head(axes, title, found, "token of the completion", "share of tokens")
    _draw(axes, points, "all steps", COLOURS[4])
    _finish(axes)
    axes.set_ylim(0, max(0.01, *(1.1 * share for _, share in points)) if points else 0.01)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")


def last_steps(timeline_path: Path) -> list[dict[str, Any]]:
    """Return the lines of the last steps, without the final evaluation, for which the engine reports no times.

    After a resume, lines of earlier steps are left out: another process wrote them, perhaps with another clock.
    """
    first_step = read_settings(timeline_path.with_name(START)).get("first_step", 0)
    since_start = (line for line in read_lines(timeline_path) if int(line["train_step"]) > first_step)
    lines = list(deque(since_start, NUM_STEPS))
    if lines:
        ends = [part for part in lines[-1]["trainer"] if part[0] not in ("evaluate", "save")]
        lines[-1] = {**lines[-1], "trainer": ends}
    return [line for line in lines if line["trainer"]]


def plot_timeline(timeline_path: Path, output_png: Path) -> None:
    """Draw the last steps of a run, one bar for the engine and one for the trainer; nothing without data."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lines = last_steps(timeline_path)
    if not lines:
        return
    origin = min(start for line in lines for _, start, _ in line["trainer"])
    end = max(end for line in lines for *_, end in line["trainer"])
    figure = Figure(figsize=(11, 3.1), dpi=120, layout="constrained")
    axes = figure.subplots()
    patches: dict[str, Patch] = {}
    for line in lines:
        bars = [(name, start, stop, 0.1) for name, start, stop in line["trainer"]]
        bars += [("sample", start, stop, 1.1) for start, stop in line["engine"]]
        for name, start, stop, row in bars:
            start, stop, colour = max(start, origin), min(stop, end), PHASES[name].colour
            if stop > start and colour is not None:
                shown = "#d5d8dc" if colour == GREY else COLOURS[colour]
                axes.broken_barh([(start - origin, stop - start)], (row, 0.8), color=shown, linewidth=0)
                patches[name] = Patch(color=shown, label=PHASES[name].meaning)
        first = line["trainer"][0][1] - origin
        axes.text(first, 2.02, str(line["train_step"]), fontsize=8, color=DIM)
        axes.axvline(first, color=DIM, linewidth=0.6, linestyle=":")
    _head(
        axes,
        f"Timeline of steps {lines[0]['train_step']} to {lines[-1]['train_step']}",
        "",
        "seconds",
        "",
    )
    axes.set(xlim=(0, end - origin), ylim=(0, 2))
    note = "gaps in the upper bar: the engine idles; grey below: the trainer waits"
    axes.text(1, 1.13, note, ha="right", transform=axes.transAxes, fontsize=8, color=DIM)
    axes.set_yticks([0.5, 1.5], ["trainer", "engine"])
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    ordered = [patches[name] for name in PHASES if name in patches]
    figure.legend(handles=ordered, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    _save(figure, output_png)


def _new_figure(num_panels: int, title: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with a grid of panels."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display needed

    columns = min(num_panels, 2 if num_panels == 4 else 3)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(PANEL_WIDTH * columns, PANEL_HEIGHT * rows + 0.5), dpi=120, layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.1, h_pad=0.1)
    figure.suptitle(_literal(title), fontsize=13, fontweight="bold")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[num_panels:]:
        unused.remove()
    return figure, panels[:num_panels]


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[RunFolder]) -> None:
    """Draw a panel; with one run, curves differ in colour; with several, runs differ in colour and curves in style."""
    _head(axes, panel.title, panel.look_for, "step", panel.unit)
    is_alone = len(runs) == 1
    labels: dict[str, str] = {}
    for place, run in enumerate(runs):
        for order, (label, points) in enumerate(_curves(run, panel)):
            line = labels.setdefault(label, LINES[len(labels) % len(LINES)])
            # Curves of shares may overlap at 100%.
            line = "-" if is_alone and not panel.shares else line
            _draw(axes, points, label, COLOURS[(order if is_alone else place) % len(COLOURS)], line)
            finite = [point for point in points if math.isfinite(point[1])]
            if is_alone and panel.title == "Right answers" and finite:
                # The last of equal points; the label of a lower last point is below it, where it hides nothing.
                best = max(reversed(finite), key=lambda point: point[1])
                texts = {best: f"best {best[1]:.0%}", finite[-1]: f"{finite[-1][1]:.0%}"}
                for point, text in texts.items():
                    offset = (0, 6 if point[1] == best[1] else -14)
                    axes.annotate(text, point, offset, textcoords="offset points", ha="right", fontsize=9)
    _finish(axes, panel)
    if is_alone and (len(panel.curves) > 1 or panel.always_named):
        axes.legend(frameon=False, fontsize=8)
    elif not is_alone and len(labels) > 1:
        keys = [_key(label, DIM, line) for label, line in labels.items()]
        axes.legend(handles=keys, frameon=False, fontsize=8)


def _curves(run: RunFolder, panel: Panel) -> list[tuple[str, Series]]:
    found = [(label, run.series(name)) for name, label in panel.curves.items()]
    return [(label, [(step, y / panel.divisor) for step, y in points]) for label, points in found if points]


def _head(axes: Axes, title: str, look_for: str, xlabel: str, ylabel: str) -> None:
    """Add the title of a panel, and the advice `look_for` below it."""
    axes.set_title(_literal(title), loc="left", fontsize=11, fontweight="bold", pad=20)
    axes.text(0, 1.03, look_for, transform=axes.transAxes, fontsize=8, color=DIM, va="bottom")
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)


def _draw(axes: Axes, points: Series, label: str, colour: str, linestyle: str = "-") -> None:
    """Draw a curve; NaN leaves a gap."""
    # A single point, or a point between two gaps, has no line.
    marker = "o" if len(points) <= 40 else ""
    axes.plot(
        *zip(*points, strict=True),
        label=_literal(label),
        color=colour,
        linestyle=linestyle,
        marker=marker,
        markersize=3.5,
        linewidth=1.4,
    )


def _key(label: str, colour: str, linestyle: str) -> Any:
    """Return an entry of a legend."""
    from matplotlib.lines import Line2D

    line: Any = linestyle
    return Line2D([], [], color=colour, linestyle=line, linewidth=2, label=_literal(label))


def _literal(text: str) -> str:
    """Return names and values of the user for matplotlib, which reads text between dollar signs as a formula."""
    return text.replace("$", r"\$")


def _finish(axes: Axes, panel: Panel | None = None) -> None:
    """Add the grid, and set the range of the panel's axis."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)
    if panel is None:
        return
    axes.locator_params(axis="x", integer=True)
    drawn: list[Any] = [line.get_ydata() for line in axes.lines]
    values: list[float] = [y for line in drawn for y in line if math.isfinite(y)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if panel.logarithmic and high > 0:
        axes.set_yscale("log")
        low = min(value for value in values if value > 0)
        spare = max(1.3, 10 ** (1 - math.log10(high / low) / 2))
        axes.set_ylim(low / spare, high * spare)
        return
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if panel.shares else short(value))
    if panel.shares:
        axes.set_ylim(-0.03, 1.03)
    elif high - low <= 1e-3 * max(abs(low), abs(high)):
        # matplotlib would magnify the rounding of nearly equal values.
        half = 0.5 * max(abs(low), abs(high)) or 1.0
        axes.set_ylim(0 if low >= 0 else low - half, high + half)
    if panel.from_zero:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _save(figure: Figure, output_png: Path) -> None:
    """Write the picture; create its folder if necessary."""
    output_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output_png)
