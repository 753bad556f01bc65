"""``vectorlm check``: what a config asks for, and whether this machine can do it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from vectorlm.cli.arguments import (
    add_memory_argument,
    add_override_arguments,
    add_path_argument,
    config_from_arguments,
)
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.preflight.local_model import missing_files
from vectorlm.runs.preflight.memory import device_memory_bytes, memory_report
from vectorlm.runs.preflight.memory_plan import GIB
from vectorlm.runs.preflight.summary import summarise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm check``."""
    parser.add_argument(
        "--device_memory_gib",
        type=_positive,
        metavar="X",
        help="plan for CUDA devices of X GiB; by default for those of this machine, or its CPU",
    )
    add_path_argument(parser)
    add_override_arguments(parser)
    add_memory_argument(parser)
    help_text = "number of machines, each with the same number of ranks (default 1)"
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Check a config file and say what the run would do."""
    checked = preflight(config_from_arguments(args), args.world_size, args.nnodes)
    asked = args.device_memory_gib
    device_bytes = device_memory_bytes() if asked is None else int(asked * GIB)
    report = memory_report(
        checked.config,
        args.world_size,
        device_bytes=device_bytes,
        ranks_per_node=args.world_size // args.nnodes,
    )
    notes: list[str] = []
    # A description alone is planned with.
    if not missing_files(Path(checked.config.model)):
        # It imports torch and transformers.
        from vectorlm.runs.preflight.dry_run import dry_run

        notes = dry_run(checked.config)
    print(f"{args.yaml_path}: ok")
    print(summarise(checked, args.world_size, args.nnodes, notes))
    print(report)
    return 0


def _positive(text: str) -> float:
    """Read a finite number above 0; argparse names this function's argument where it raises."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a finite number above 0")
    return number
