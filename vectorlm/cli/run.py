"""``vectorlm run``, and the scripts that do the same: check a config, then train as it says."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from vectorlm.cli import at_interrupt, exit_code
from vectorlm.cli.arguments import (
    add_config_arguments,
    add_memory_argument,
    add_override_arguments,
    add_path_argument,
    add_profile_argument,
    config_from_arguments,
)
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight.accelerate import accelerate_overrides
from vectorlm.runs.preflight.local_model import with_download


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm run``."""
    add_path_argument(parser)
    add_override_arguments(parser)
    add_memory_argument(parser)
    add_profile_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Check the config, then train on every rank: by rewards where it has a section ``rl``, else on text."""
    config = config_from_arguments(args)
    asked = accelerate_overrides(config, os.environ, args.world_size)
    if asked:
        config = load_config(args.yaml_path, [*args.overrides, *asked])
    config = with_download(config)
    from vectorlm.runs.calls import start

    is_main = Topology.from_environment().is_main
    if asked and is_main:
        print(f"from accelerate: {', '.join(asked)}", file=sys.stderr)
    with at_interrupt("with checkpoints, the same command goes on from the last one"):
        what_was = start(config, args.world_size)
    if is_main:
        end = f"the model is in {Path(config.train_parameters.output_dir, 'final-model')}"
        print(what_was or end, file=sys.stderr)
    return 0


def run_script(section: str, description: str) -> None:
    """Be a script that does what ``vectorlm run`` does, for one kind of training.

    Args:
        section: The section of the config that the script needs: ``dataset`` or ``rl``.
        description: What ``--help`` shows.
    """
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=as_written)
    add_config_arguments(parser)
    args = parser.parse_args()

    def run_section() -> int:
        if getattr(config_from_arguments(args), section) is None:
            raise ConfigError(
                f"{args.yaml_path} has no section {section!r}: llama_example_mp.py trains on text (dataset), "
                "rl_example_mp.py on rewards (rl). Name another file with --yaml_path."
            )
        return run(args)

    sys.exit(exit_code(run_section))
