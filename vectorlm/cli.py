"""The ``vectorlm`` command: one function per subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vectorlm.config.arguments import add_override_arguments, config_from_arguments
from vectorlm.config.check import check_config
from vectorlm.config.summary import summarise
from vectorlm.errors import ConfigError, VectorLMError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 1 (the run failed) or 2 (the input was wrong)."""
    args = build_parser().parse_args(argv)
    try:
        return args.run_command(args)
    except VectorLMError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every subcommand; each sets `run_command` to its function."""
    description = "Train a language model and sample from it on the same devices."
    parser = argparse.ArgumentParser(prog="vectorlm", description=description)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="check a config file without starting anything")
    check.add_argument("yaml_path", metavar="my.yaml", help="the config file")
    add_override_arguments(check)
    check.set_defaults(run_command=run_check)
    return parser


def run_check(args: argparse.Namespace) -> int:
    """Check a config file and say what the run would do."""
    config = config_from_arguments(args)
    check_config(config, args.world_size)
    print(f"{args.yaml_path}: ok")
    print(summarise(config, args.world_size))
    return 0
