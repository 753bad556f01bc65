"""``vectorlm watch``: show a run's progress in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vectorlm.report.panels import Panel, short
from vectorlm.report.plots import filled_panels
from vectorlm.report.runs import NUM_RECENT, RunFolder

if TYPE_CHECKING:
    from rich.text import Text

EVERY_S = 1.0
PLAIN_HEIGHT = 48
"""Maximum lines of a frame outside a terminal."""
LABEL_WIDTH, VALUE_WIDTH = 24, 9
SPARKS = "▁▂▃▄▅▆▇█"
ALWAYS_SHOWN = ("reward/mean", "eval/accuracy")
"""Metrics that are shown even while they are 0."""


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm watch``."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="the output_dir of a run")
    help_text = "print the progress once, and end; the default if the output is not a terminal"
    parser.add_argument("--once", action="store_true", help=help_text)


def watch_command(args: argparse.Namespace) -> int:
    """Show the run until it ends, or until Ctrl-C."""
    watched = RunFolder(args.folder)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # A pipe gets no colours, even under Jupyter, which requests them. Rich must not colour numbers in samples.
    in_terminal = sys.stdout.isatty()
    console = Console(force_terminal=in_terminal, highlight=False)
    if in_terminal and not args.once:
        live = Live(console=console, screen=True, auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt):
            try:
                # No `with`: Ctrl-C may come while it starts.
                live.start()
                while watched.is_running:
                    began = time.monotonic()
                    live.update(Text("\n").join(frame(watched, console.width, console.height)), refresh=True)
                    # Reading the files of a long run takes time.
                    time.sleep(max(EVERY_S, 9 * (time.monotonic() - began)))
            finally:
                live.stop()
    height = console.height - 1 if in_terminal else PLAIN_HEIGHT
    for line in frame(watched, console.width, height):
        console.print(line, soft_wrap=True)
    return 0


def frame(watched: RunFolder, width: int, height: int) -> list[Text]:
    """Return at most `height` lines that show a run; a line is at most `width` cells wide."""
    from rich.text import Text

    state, is_well = watched.state()
    style = "green" if is_well else "red"
    head = [Text.assemble((f"{watched.name}  ", "bold"), (state, style)), Text(watched.progress())]
    room = width - LABEL_WIDTH - VALUE_WIDTH - 2
    curves = [
        Text(f"{metric:{LABEL_WIDTH}}{_shown(values[-1], panel):>{VALUE_WIDTH}}  {sparkline(values, room)}")
        for panel in filled_panels([watched])
        for metric in panel.curves
        if (values := [value / panel.divisor for _, value in watched.series(metric)])
        and (any(values) or metric in ALWAYS_SHOWN)
    ]
    phases = [
        Text(f"{phase:{LABEL_WIDTH}}{share:>{VALUE_WIDTH}.0%}  {'█' * round(room * share) or '▏'}")
        for phase, _, share in watched.phases(NUM_RECENT)
    ]
    samples = watched.newest_samples()
    texts = [Text(f"samples of step {samples[0].step}")] if samples else []
    for sample in samples:
        reward = "" if sample.reward is None else f"{sample.reward:.2f}"
        prompt = _visible(sample.prompt)
        # The end of a prompt matters most for the completion.
        prompt = prompt if len(prompt) <= width // 2 else "…" + prompt[-(width // 3) :]
        texts.append(Text.assemble(f"{reward:>6}  ", (f"{prompt} → ", "dim"), _visible(sample.completion)))
    # Every block but the last leaves lines for the next blocks.
    spare = height - len(head)
    blocks = [curves[: max(2, spare // 2)], phases[: max(1, spare // 4)], texts]
    lines = head + [line for block in blocks if block for line in (Text(), *block)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def _shown(value: float, panel: Panel) -> str:
    if not math.isfinite(value):
        return "not finite"
    if panel.shares:
        return f"{value:.1%}"
    return short(value) if panel.divisor == 1 else f"{short(value)} {panel.unit}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of at most `width` characters; a character is a mean over steps, blank where none is finite."""
    width = min(width, len(values))
    means = []
    for column in range(width):
        part = values[column * len(values) // width : (column + 1) * len(values) // width]
        finite = [value for value in part if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    known = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    text = ""
    for mean in means:
        height = (mean - low) / (high - low) if high > low else 0.5
        text += SPARKS[round(height * (len(SPARKS) - 1))] if math.isfinite(mean) else " "
    return text


def _visible(text: str) -> str:
    """Return text on one line, without control characters."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
