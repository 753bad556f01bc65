"""The ``vectorlm`` command: one function per subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vectorlm.config.arguments import (
    add_nnodes_argument,
    add_override_arguments,
    config_from_arguments,
)
from vectorlm.config.check import check_config
from vectorlm.config.summary import summarise
from vectorlm.errors import ConfigError, VectorLMError
from vectorlm.memory.device import device_memory_bytes
from vectorlm.memory.from_config import memory_report
from vectorlm.memory.plan import GIB
from vectorlm.rewards.registry import reward_names


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
    check.set_defaults(run_command=run_check)
    check.add_argument(
        "--device_memory_gib",
        type=float,
        metavar="X",
        help="plan for CUDA devices of X GiB; by default for those of this machine, or its CPU",
    )
    preprocess = commands.add_parser("preprocess", help="make a dataset as dataset_preprocess says")
    preprocess.set_defaults(run_command=run_preprocess)
    for command in (check, preprocess):
        command.add_argument("yaml_path", metavar="my.yaml", help="the config file")
        add_override_arguments(command)
    add_nnodes_argument(check)
    return parser


def run_check(args: argparse.Namespace) -> int:
    """Check a config file and say what the run would do."""
    config = config_from_arguments(args)
    check_config(config, args.world_size, reward_names(), args.nnodes)
    asked = args.device_memory_gib
    device_bytes = device_memory_bytes() if asked is None else int(asked * GIB)
    report = memory_report(
        config, args.world_size, device_bytes=device_bytes, ranks_per_node=args.world_size // args.nnodes
    )
    print(f"{args.yaml_path}: ok")
    print(summarise(config, args.world_size, args.nnodes))
    print(report)
    return 0


def run_preprocess(args: argparse.Namespace) -> int:
    """Tokenise and pack a text dataset, and save it where training will look for it."""
    config = config_from_arguments(args)
    settings = config.dataset_preprocess
    if settings is None:
        raise ConfigError(
            f"{args.yaml_path} has no section dataset_preprocess: it says what to make, and from what."
        )
    # Heavy imports: `vectorlm check` must not wait for them.
    from vectorlm.data.preprocess import load_text, preprocess
    from vectorlm.model.load import load_tokenizer

    dataset = preprocess(
        load_text(settings.load_path, from_disk=settings.from_disk, split=settings.split),
        load_tokenizer(config.model),
        data_field=settings.data_field,
        max_seq_len=config.train_parameters.max_seq_len,
        packing_type=settings.packing_type,
        overlap=settings.overlap,
        add_bos_eos_tokens=settings.add_bos_eos_tokens,
        seperator=settings.seperator,
        truncate=settings.truncate,
        pre_pend=settings.pre_pend,
        ignore_index=settings.ignore_index,
    )
    dataset.save_to_disk(settings.save_path)
    print(
        f"{settings.save_path}: {len(dataset)} rows of at most {config.train_parameters.max_seq_len} tokens"
    )
    return 0
