"""``vectorlm report``: one HTML page that shows runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm report``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="the output_dir of a run")
    help_text = "the page (default report.html in the folder of the first run)"
    parser.add_argument("--output", metavar="FILE", type=Path, help=help_text)


def run(args: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from vectorlm.report.report import write_report
    from vectorlm.report.runs import RunFolder

    output = args.output or args.runs[0] / "report.html"
    write_report([RunFolder(path) for path in args.runs], output)
    print(f"{output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0
