"""``vectorlm report`` and ``vectorlm plot``: pages and pictures of runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path

from vectorlm.errors import ConfigError

EVERY_S = 5.0
"""Seconds between two writes of the page with --follow; longer if writing takes long."""


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm report``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="the output_dir of a run")
    help_text = "the page (default report.html in the folder of the first run)"
    parser.add_argument("--output", metavar="FILE", type=Path, help=help_text)
    help_text = "update the page until the runs end; a browser reloads it automatically"
    parser.add_argument("--follow", action="store_true", help=help_text)


def report_command(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from vectorlm.report.page import write_page
    from vectorlm.report.runs import RunFolder

    runs = [RunFolder(path) for path in args.runs]
    output = args.output or args.runs[0] / "report.html"
    _require_writable(output)
    write_page(runs, output, EVERY_S if args.follow else None)
    until = ", updated until the runs end or Ctrl-C" if args.follow else ""
    print(f"{output} ({output.stat().st_size / 1e6:.1f} MB){until}", flush=True)
    if args.follow:
        try:
            with contextlib.suppress(KeyboardInterrupt):
                pause_s = EVERY_S
                while any(run.is_running for run in runs):
                    time.sleep(pause_s)
                    began = time.monotonic()
                    write_page(runs, output, pause_s)
                    # Writing takes at most a tenth of the time, even if the files are long.
                    pause_s = max(EVERY_S, 9 * (time.monotonic() - began))
        finally:
            # The final page does not reload itself.
            write_page(runs, output)
    return 0


def add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm plot``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="the output_dir of a run")
    help_text = "plot these metrics instead of the default ones, for example train/loss,perf/mfu"
    parser.add_argument("--metrics", metavar="A,B", default="", help=help_text)
    help_text = "the picture (default plot.png)"
    parser.add_argument("--output", metavar="FILE", type=Path, default=Path("plot.png"), help=help_text)


def plot_command(args: argparse.Namespace) -> int:
    """Plot the runs and print the settings that differ."""
    # These import matplotlib when they draw.
    from vectorlm.report.plots import plot_runs
    from vectorlm.report.runs import RunFolder, differences, names_of

    runs = [RunFolder(path) for path in args.runs]
    metrics = [name.strip() for name in args.metrics.split(",") if name.strip()]
    _require_writable(args.output)
    output = args.output if args.output.suffix else args.output.with_suffix(".png")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if output.suffix[1:].lower() not in known:
        raise ConfigError(
            f"--output {output}: the ending must be a picture format of matplotlib ({', '.join(sorted(known))}). Use "
            f"{output.with_suffix('.png')}, for example."
        )
    if not plot_runs(runs, output, metrics):
        raise ConfigError(f"{', '.join(names_of(runs))} logged nothing to plot. Wait for the first step.")
    for name, values in differences(runs).items():
        told = ", ".join(f"{run}: {value}" for run, value in zip(names_of(runs), values, strict=True))
        print(f"{name} differs: {told}")
    print(output)
    return 0


def _require_writable(output: Path) -> None:
    """Refuse a path at which no file can be written, before anything is read or drawn."""
    folder = next(folder for folder in output.absolute().parents if folder.exists())
    if output.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"--output {output}: it must be a file in a folder that you may write to. Name another file."
        )
