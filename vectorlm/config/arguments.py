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
    parser.add_argument("--world_size", type=int, default=1, metavar="N", help="number of ranks (default 1)")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override one setting, for example train_parameters.epochs=3; may be repeated",
    )


def config_from_arguments(args: argparse.Namespace) -> Config:
    """Load the config that the parsed arguments ask for.

    Raises:
        ConfigError: as `load_config`; call `check_config` next for the rules that need the number of ranks.
    """
    return load_config(args.yaml_path, args.overrides)
