"""How the pictures of a run look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2f6fb0", "#e07b28", "#2a9461", "#c23b4e", "#8059b3", "#8a6a4f", "#d06aa8", "#6b7480")
"""For the curves of a panel or, where runs are compared, for the runs; told apart with red-green blindness too."""
LINES = ("-", "--", ":", "-.")
"""For the curves of a panel where the colour tells the run."""
PANEL_WIDTH, PANEL_HEIGHT = 4.4, 3.1
"""Inches."""


def new_figure(num_panels: int, title: str, max_columns: int = 3) -> tuple[Figure, list[Axes]]:
    """Return a figure with a grid of panels."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display needed

    columns = min(num_panels, max_columns if num_panels != 4 else 2)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(PANEL_WIDTH * columns, PANEL_HEIGHT * rows + 0.5), dpi=120, layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.1, h_pad=0.1)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[num_panels:]:
        unused.remove()
    return figure, panels[:num_panels]


def head(axes: Axes, title: str, look_for: str, **labels: Any) -> None:
    """Title a panel, and say below the title what to look for."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=20)
    axes.text(0, 1.03, look_for, transform=axes.transAxes, fontsize=8, color="#666666", va="bottom")
    axes.set(**labels)


def draw(axes: Axes, points: Sequence[tuple[float, float]], label: str, **style: Any) -> None:
    """Draw a curve; a value that is not a number leaves a gap."""
    # A single point, or one between two gaps, has no line.
    marker = "o" if len(points) <= 40 else ""
    axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=3.5, linewidth=1.4, **style)


def finish(axes: Axes, *, shares: bool = False, with_legend: bool = False) -> None:
    """Give a panel that is drawn its grid, its range and its legend; `shares` are from 0 to 1."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    if shares:
        axes.set_ylim(-0.03, 1.03)
    else:
        _widen(axes)
    if axes.get_yscale() == "linear":
        style: Any = (lambda value, _: f"{value:.0%}") if shares else short
        axes.yaxis.set_major_formatter(style)
    if with_legend:
        axes.legend(frameon=False, fontsize=8)


def save(figure: Figure, output_png: Path) -> None:
    """Write the picture, and the folder that it is in."""
    output_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output_png)


def short(value: float, _: Any = None) -> str:
    """Write a number of an axis in few characters: 1.5k, 20M, 0.003, 2e-5."""
    if value and not 1e-3 <= abs(value) < 1e15:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _widen(axes: Axes) -> None:
    """Give values that hardly differ an axis on which that shows: matplotlib's would magnify their rounding."""
    # Lines without a label mark a bound.
    drawn: list[Any] = [line.get_ydata() for line in axes.lines if not str(line.get_label()).startswith("_")]
    values: list[float] = [y for line in drawn for y in line if math.isfinite(y)]
    if not values:
        return
    low, high = min(values), max(values)
    if axes.get_yscale() == "log":
        decades = math.log10(high / low)
        if decades < 2:
            spare = 10 ** (1 - decades / 2)
            axes.set_ylim(low / spare, high * spare)
    elif high - low <= 1e-3 * max(abs(low), abs(high)):
        half = 0.5 * max(abs(low), abs(high)) or 1.0
        axes.set_ylim(0 if low >= 0 else low - half, high + half)
