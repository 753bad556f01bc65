"""The command-line arguments that choose a config, the same on every script."""

from __future__ import annotations

import argparse

from vectorlm.config.load import load_config
from vectorlm.config.schema import Config


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--yaml_path``, ``--world_size`` and the repeatable ``--set``."""
    parser.add_argument("--yaml_path", required=True, help="the config file")
    add_override_arguments(parser)


def add_override_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--world_size`` and the repeatable ``--set`` alone, for commands that name the file themselves."""
    help_text = "number of ranks, on all nodes together (default 1)"
    parser.add_argument("--world_size", type=int, default=1, metavar="N", help=help_text)
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override one setting, for example train_parameters.epochs=3; may be repeated",
    )


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--nnodes``, ``--node_rank`` and ``--rdzv_endpoint``, for scripts that start the ranks themselves."""
    add_nnodes_argument(parser)
    help_text = "index of this machine, from 0 (default 0)"
    parser.add_argument("--node_rank", type=int, default=0, metavar="N", help=help_text)
    help_text = "machine 0 and a free port of it, the same on every machine; needed with --nnodes"
    parser.add_argument("--rdzv_endpoint", metavar="HOST:PORT", help=help_text)


def add_nnodes_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--nnodes`` alone."""
    help_text = "number of machines, each with as many of the ranks (default 1)"
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help=help_text)


def config_from_arguments(args: argparse.Namespace) -> Config:
    """Load the config that the parsed arguments ask for.

    Raises:
        ConfigError: as `load_config`; call `check_config` next for the rules that need the number of ranks.
    """
    return load_config(args.yaml_path, args.overrides)
