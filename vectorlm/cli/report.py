"""``vectorlm report``: one HTML page that shows runs."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

EVERY_S = 5.0
"""With --follow, the page is written this often; less often where writing it takes long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm report``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="the output_dir of a run")
    help_text = "the page (default report.html in the folder of the first run)"
    parser.add_argument("--output", metavar="FILE", type=Path, help=help_text)
    help_text = "write the page again while a run goes on; in a browser it loads itself again"
    parser.add_argument("--follow", action="store_true", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from vectorlm.report.page import write_page
    from vectorlm.report.runs import RunFolder

    runs = [RunFolder(path) for path in args.runs]
    output = args.output or args.runs[0] / "report.html"
    write_page(runs, output, EVERY_S if args.follow else None)
    until = ", written again until the runs end or Ctrl-C" if args.follow else ""
    print(f"{output} ({output.stat().st_size / 1e6:.1f} MB){until}", flush=True)
    if args.follow:
        try:
            with contextlib.suppress(KeyboardInterrupt):
                pause_s = EVERY_S
                while any(run.is_running for run in runs):
                    time.sleep(pause_s)
                    began = time.monotonic()
                    write_page(runs, output, pause_s)
                    # At most a tenth of the time, also where the files have become long.
                    pause_s = max(EVERY_S, 9 * (time.monotonic() - began))
        finally:
            # A page that nobody writes any more does not load itself again.
            write_page(runs, output)
    return 0
