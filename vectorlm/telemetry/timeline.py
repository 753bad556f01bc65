"""The timeline of a run: when engine and trainer worked, in a file and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vectorlm.telemetry.step_lines import StepLines
from vectorlm.train.recorder import Span

COLOURS = {
    "sample": "tab:blue",
    "generate": "lightgray",
    "publish": "tab:red",
    "score": "tab:olive",
    "assess": "tab:orange",
    "update": "tab:green",
    "exam": "tab:purple",
}
LABELS = {"sample": "engine computes", "generate": "trainer waits for completions"}
NUM_STEPS = 12
"""The picture shows this many of the last steps."""


class Timeline:
    """Writes the spans of every step, in seconds of the host's monotonic clock, which all its processes share."""

    def __init__(self, path: Path | None, resume_step: int | None = None) -> None:
        # None on ranks that write nothing.
        self._lines = None if path is None else StepLines(path, resume_step)

    def write(self, step: int, trainer: Iterable[Span], engine: Sequence[tuple[float, float]]) -> None:
        """Write the spans of `step`: the trainer's, and when the engine computed before its weights changed."""
        if self._lines is not None:
            spans = [(_short(name), start, end) for name, start, end in trainer if _short(name) in COLOURS]
            self._lines.write(step, [{"trainer": spans, "engine": [list(span) for span in engine]}])


def plot_timeline(timeline_path: str | Path, output_png: str | Path) -> None:
    """Draw the last steps of a run: one bar for the engine, one for the trainer. Draws nothing without data."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    path = Path(timeline_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    lines = lines[-NUM_STEPS:]
    starts = [start for line in lines for _, start, _ in line["trainer"]]
    if not starts:
        return
    origin, end = min(starts), max(end for line in lines for *_, end in line["trainer"])
    figure = Figure(figsize=(11, 2.8), dpi=120, layout="constrained")
    axes = figure.subplots()
    for line in lines:
        for name, start, stop in line["trainer"]:
            axes.broken_barh([(start - origin, stop - start)], (0.1, 0.8), color=COLOURS[name], linewidth=0)
        for start, stop in line["engine"]:
            if stop > origin:
                begin = max(start, origin) - origin
                axes.broken_barh(
                    [(begin, stop - origin - begin)], (1.1, 0.8), color=COLOURS["sample"], linewidth=0
                )
    axes.set(
        title=f"Steps {lines[0]['train_step']} to {lines[-1]['train_step']}",
        xlabel="seconds",
        xlim=(0, end - origin),
        ylim=(0, 2),
    )
    axes.set_yticks([0.5, 1.5], ["trainer", "engine"])
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour, label=LABELS.get(name, name)) for name, colour in COLOURS.items()]
    axes.legend(
        handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=7, frameon=False, fontsize=8
    )
    figure.savefig(output_png)


def _short(name: Any) -> str:
    """Return the phase in the name of a span, ``time/<phase>_s``."""
    return str(name).removeprefix("time/").removesuffix("_s")
