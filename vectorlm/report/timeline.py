"""The timeline of a run: when engine and trainer worked, in a file and as a picture."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vectorlm.report.runs import read_lines
from vectorlm.report.step_lines import StepLines
from vectorlm.report.style import COLOURS, head, save
from vectorlm.train.recorder import Span

PHASES = {
    "sample": ("engine computes", COLOURS[0]),
    "generate": ("trainer waits for completions", "#d5d8dc"),
    "score": ("rewards", COLOURS[1]),
    "assess": ("assess: forward passes", COLOURS[6]),
    "update": ("optimizer steps", COLOURS[2]),
    "publish": ("hot swap", COLOURS[3]),
    "evaluate": ("evaluation", COLOURS[4]),
    "save": ("checkpoint", COLOURS[5]),
}
"""Label and colour of what engine and trainer do."""
NUM_STEPS = 12
"""The picture shows this many of the last steps."""


class Timeline:
    """Writes the spans of every step, in seconds of the host's monotonic clock, which all its processes share."""

    def __init__(self, path: Path | None, resume_step: int | None = None) -> None:
        # None on ranks that write nothing.
        self._lines = None if path is None else StepLines(path, resume_step)

    def write(self, step: int, trainer: Iterable[Span], engine: Sequence[tuple[float, float]]) -> None:
        """Write the spans of `step`: the trainer's, and when the engine computed up to the step's hot swap."""
        if self._lines is not None:
            spans = [(_short(name), start, end) for name, start, end in trainer if _short(name) in PHASES]
            self._lines.write(step, [{"trainer": spans, "engine": [list(span) for span in engine]}])


def last_steps(timeline_path: Path) -> list[dict[str, Any]]:
    """Return the lines of the last steps, without the evaluation at the end, of which the engine never reports."""
    lines = list(deque(read_lines(timeline_path), NUM_STEPS))
    if lines:
        ends = [span for span in lines[-1]["trainer"] if span[0] not in ("evaluate", "save")]
        lines[-1] = {**lines[-1], "trainer": ends}
    return [line for line in lines if line["trainer"]]


def plot_timeline(timeline_path: str | Path, output_png: str | Path) -> None:
    """Draw the last steps of a run: one bar for the engine, one for the trainer. Draws nothing without data."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lines = last_steps(Path(timeline_path))
    if not lines:
        return
    origin = min(start for line in lines for _, start, _ in line["trainer"])
    end = max(end for line in lines for *_, end in line["trainer"])
    figure = Figure(figsize=(11, 3.1), dpi=120, layout="constrained")
    axes = figure.subplots()
    used = set()
    for line in lines:
        bars = [(name, start, stop, 0.1) for name, start, stop in line["trainer"]]
        bars += [("sample", start, stop, 1.1) for start, stop in line["engine"]]
        for name, start, stop, row in bars:
            start, stop = max(start, origin), min(stop, end)
            if stop > start and name in PHASES:
                span = (start - origin, stop - start)
                axes.broken_barh([span], (row, 0.8), color=PHASES[name][1], linewidth=0)
                used.add(name)
        first = line["trainer"][0][1] - origin
        axes.text(first, 2.02, str(line["train_step"]), fontsize=8, color="#666666")
        axes.axvline(first, color="#666666", linewidth=0.6, linestyle=":")
    title = f"Who worked when, steps {lines[0]['train_step']} to {lines[-1]['train_step']}"
    head(axes, title, "", xlabel="seconds", xlim=(0, end - origin), ylim=(0, 2))
    axes.text(
        1,
        1.13,
        "gaps in the upper bar: the engine idles; grey below: the trainer waits",
        ha="right",
        transform=axes.transAxes,
        fontsize=8,
        color="#666666",
    )
    axes.set_yticks([0.5, 1.5], ["trainer", "engine"])
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour, label=text) for name, (text, colour) in PHASES.items() if name in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    save(figure, Path(output_png))


def _short(name: Any) -> str:
    """Return the phase in the name of a span, ``time/<phase>_s``."""
    return str(name).removeprefix("time/").removesuffix("_s")
