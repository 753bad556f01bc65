"""``vectorlm doctor``: would a run start on this machine, and if not, what to do."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vectorlm.errors import LaunchError

if TYPE_CHECKING:
    from vectorlm.cli.verdicts import Verdict


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
    from vectorlm.cli.verdicts import STOP, judge

    facts = look()
    verdicts = judge(facts)
    if args.json:
        shown = [verdict._asdict() for verdict in verdicts]
        print(json.dumps({"verdicts": shown, "facts": dataclasses.asdict(facts)}, indent=2))
    else:
        print(report(verdicts))
    return int(any(verdict.level == STOP for verdict in verdicts))


def report(verdicts: Sequence[Verdict]) -> str:
    """Return a line for each verdict, its fix below it, and what they come to."""
    from vectorlm.cli.verdicts import OK, STOP, WARN

    width = max(len(verdict.name) for verdict in verdicts)
    lines = []
    for level, name, text, fix in verdicts:
        lines.append(f"{level:4}  {name:{width}}  {text}")
        if level != OK:
            lines.append(f"{'':{width + 8}}{fix}")
    stops, warnings = (sum(verdict.level == level for verdict in verdicts) for level in (STOP, WARN))
    if stops:
        lines.append(f"\nA run would not start here: {stops} STOP, {warnings} warn.")
    elif warnings:
        lines.append(f"\nA run starts here, but look at the {warnings} warning{'s' * (warnings > 1)}.")
    else:
        lines.append("\nA run starts here.")
    return "\n".join(lines)
