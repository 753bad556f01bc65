"""``vectorlm check``: what a config asks for, and whether this machine can do it."""

from __future__ import annotations

import argparse
import math

from vectorlm.config.load import add_override_arguments, add_path_argument, config_from_arguments
from vectorlm.config.schema import Config
from vectorlm.preflight.local_model import resolve_model
from vectorlm.preflight.memory import device_memory_bytes, memory_report
from vectorlm.preflight.memory_plan import GIB
from vectorlm.preflight.rewards import check_rewards
from vectorlm.preflight.settings import check_config
from vectorlm.preflight.summary import summarise
from vectorlm.rewards.registry import reward_names


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
    help_text = "number of machines, each with the same number of ranks (default 1)"
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Check a config file and say what the run would do."""
    config = resolve_model(config_from_arguments(args))
    check_all(config, args.world_size, args.nnodes)
    asked = args.device_memory_gib
    device_bytes = device_memory_bytes() if asked is None else int(asked * GIB)
    report = memory_report(
        config, args.world_size, device_bytes=device_bytes, ranks_per_node=args.world_size // args.nnodes
    )
    print(f"{args.yaml_path}: ok")
    print(summarise(config, args.world_size, args.nnodes))
    print(report)
    return 0


def check_all(config: Config, world_size: int, num_nodes: int) -> None:
    """Check the config of a run of either kind against this machine.

    Raises:
        ConfigError: The run cannot be carried out.
    """
    check_config(config, world_size, reward_names(), num_nodes)
    check_rewards(config)
    if config.rl is None:
        return
    # These import torch, which the check of a config for fine-tuning does without.
    from vectorlm.preflight.rl import check_prompt_lengths, check_rl
    from vectorlm.preflight.teacher import check_teacher

    check_rl(config)
    check_prompt_lengths(config)
    check_teacher(config)


def _positive(text: str) -> float:
    """Read a finite number above 0; argparse names this function's argument where it raises."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a finite number above 0")
    return number
