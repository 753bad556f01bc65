"""``vectorlm doctor``: would a run start on this machine, and if not, what to do."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform

from vectorlm.errors import LaunchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm doctor``."""
    parser.add_argument("--json", action="store_true", help="print facts and verdicts as JSON")


def run(args: argparse.Namespace) -> int:
    """Look at this machine, print the verdicts; 1 if something would stop every run."""
    if platform.system() != "Linux":
        raise LaunchError(
            f"vectorlm runs on Linux, and this is {platform.system()}: use a container or a Linux machine."
        )
    from vectorlm.cli.machine import look
    from vectorlm.cli.verdicts import STOP, judge, report

    facts = look()
    verdicts = judge(facts)
    if args.json:
        shown = [verdict._asdict() for verdict in verdicts]
        print(json.dumps({"verdicts": shown, "facts": dataclasses.asdict(facts)}, indent=2))
    else:
        print(report(verdicts))
    return int(any(verdict.level == STOP for verdict in verdicts))
