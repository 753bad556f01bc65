"""Command-line arguments that choose a config and override its settings."""

from __future__ import annotations

import argparse

from vectorlm.runs.config.load import DEFAULT_PATH, load_config
from vectorlm.runs.config.schema import Config
from vectorlm.train.settings import PROFILE_STEPS


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--yaml_path``, ``--world_size`` and the repeatable ``--set``."""
    help_text = f"the config file (default {DEFAULT_PATH})"
    parser.add_argument("--yaml_path", default=DEFAULT_PATH, help=help_text)
    for name in ("--nnodes", "--node_rank", "--rdzv_endpoint"):
        parser.add_argument(name, action=_Torchrun, help=argparse.SUPPRESS)
    add_override_arguments(parser)
    add_memory_argument(parser)
    add_profile_argument(parser)


def add_path_argument(parser: argparse.ArgumentParser) -> None:
    """Add the config file as the command's only positional argument."""
    help_text = f"the config file (default {DEFAULT_PATH})"
    parser.add_argument("yaml_path", nargs="?", default=DEFAULT_PATH, metavar="my.yaml", help=help_text)


def add_override_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--world_size`` and the repeatable ``--set``, for commands with their own argument for the file."""
    help_text = "number of ranks, on all nodes together (default 1)"
    parser.add_argument("--world_size", type=int, default=1, metavar="N", help=help_text)
    add_set_argument(parser)


def add_set_argument(parser: argparse.ArgumentParser) -> None:
    """Add the repeatable ``--set``."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override one setting, for example train_parameters.epochs=3; may be repeated",
    )


def add_memory_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--ignore_memory_plan``, which overrides one setting."""
    parser.add_argument(
        "--ignore_memory_plan",
        dest="overrides",
        action="append_const",
        const="ignore_memory_plan=true",
        help="start even if the memory plan does not fit, and print its numbers",
    )


def add_profile_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--profile``, which overrides one setting."""
    parser.add_argument(
        "--profile",
        dest="overrides",
        action="append_const",
        const=f"train_parameters.profile_steps={PROFILE_STEPS}",
        help=f"record {PROFILE_STEPS} steps with torch's profiler, and print a table of phases at the end of the run",
    )


class _Torchrun(argparse.Action):
    """Refuse an argument that belongs to torchrun."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        parser.error(
            f"{option_string} belongs to torchrun, which starts several machines: torchrun --nnodes 2 "
            f"--nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint HOST:29400 {parser.prog} ... (docs/multi_node.md)"
        )


def config_from_arguments(args: argparse.Namespace) -> Config:
    """Load the config that the parsed arguments name.

    Raises:
        ConfigError: as `load_config`.
    """
    return load_config(args.yaml_path, args.overrides)
