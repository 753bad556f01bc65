"""``vectorlm plot``: the curves of runs in one picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from vectorlm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm plot``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="the output_dir of a run")
    help_text = "draw these metrics instead of the usual ones, for example train/loss,perf/mfu"
    parser.add_argument("--metrics", metavar="A,B", default="", help=help_text)
    help_text = "the picture (default plot.png)"
    parser.add_argument("--output", metavar="FILE", type=Path, default=Path("plot.png"), help=help_text)


def run(args: argparse.Namespace) -> int:
    """Draw the runs and say which settings differ."""
    # These import matplotlib when they draw.
    from vectorlm.report.plots import plot_runs
    from vectorlm.report.runs import RunFolder, differences, names_of

    runs = [RunFolder(path) for path in args.runs]
    metrics = [name.strip() for name in args.metrics.split(",") if name.strip()]
    if not plot_runs(runs, args.output, metrics):
        raise ConfigError(f"{', '.join(names_of(runs))} logged nothing to draw. Wait for the first step.")
    for name, values in differences(runs).items():
        told = ", ".join(f"{run}: {value}" for run, value in zip(names_of(runs), values, strict=True))
        print(f"{name} differs: {told}")
    print(args.output)
    return 0
