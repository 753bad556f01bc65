"""The ``vectorlm`` command, one function per subcommand, and the scripts that train."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence

import vectorlm
from vectorlm.ask import add_sample_arguments, answer, read_request
from vectorlm.backends.server.serve import add_serve_arguments, serve
from vectorlm.config.check import check_config
from vectorlm.config.load import add_config_arguments, add_override_arguments, config_from_arguments
from vectorlm.config.resume import find_resumption, say_finished
from vectorlm.config.schema import Config
from vectorlm.config.summary import summarise
from vectorlm.errors import ConfigError, VectorLMError
from vectorlm.memory.from_config import device_memory_bytes, memory_report
from vectorlm.memory.plan import GIB
from vectorlm.rewards.registry import reward_names

COMMANDS = {
    "check": (
        "check a config file without starting anything",
        "vectorlm check configs/countdown_sft.yaml --world_size 2",
    ),
    "preprocess": (
        "make a dataset as the config's dataset_preprocess section says",
        "vectorlm preprocess my.yaml --set dataset_preprocess.save_path=data/mine",
    ),
    "sample": (
        "continue prompts with a model",
        'vectorlm sample --model data/countdown/model --prompt "Using the numbers 3, 5, 8 make 16."',
    ),
    "serve": (
        "run a vLLM server whose weights a trainer on this machine can replace",
        "vectorlm serve --model data/countdown/model --port 8000 -- --dtype float32",
    ),
}
"""By name: what a command does, and an example."""

HELP = """Train a language model with PyTorch FSDP and sample from it with vLLM on the same devices: the weights are
hot-swapped inside the running engine between optimizer steps.

commands:
{commands}

examples:
{examples}

`vectorlm COMMAND --help` lists a command's arguments. README.md shows a training run; docs/ has the rest:
config.md every setting, engines.md the engines, architecture.md how it works."""


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
    parser = argparse.ArgumentParser(
        prog="vectorlm",
        usage="vectorlm COMMAND ...",
        description=HELP.format(
            commands="\n".join(f"  {name:12}{what}" for name, (what, _) in COMMANDS.items()),
            examples="\n".join(f"  {example}" for _, example in COMMANDS.values()),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    # Named in the description; argparse's own list would wrap it.
    added = parser.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS, prog="vectorlm")
    check, preprocess, sample, served = (
        added.add_parser(name, description=f"{what[0].upper()}{what[1:]}.", epilog=f"example: {example}")
        for name, (what, example) in COMMANDS.items()
    )
    parser.set_defaults(run_command=lambda args: run_help(parser))
    check.set_defaults(run_command=run_check)
    check.add_argument(
        "--device_memory_gib",
        type=_positive,
        metavar="X",
        help="plan for CUDA devices of X GiB; by default for those of this machine, or its CPU",
    )
    preprocess.set_defaults(run_command=run_preprocess)
    for command in (check, preprocess):
        command.add_argument("yaml_path", metavar="my.yaml", help="the config file")
        add_override_arguments(command)
    help_text = "number of machines, each with the same number of ranks (default 1)"
    check.add_argument("--nnodes", type=int, default=1, metavar="N", help=help_text)
    sample.set_defaults(run_command=run_sample)
    add_sample_arguments(sample)
    served.set_defaults(run_command=serve)
    add_serve_arguments(served)
    return parser


def run_script(train: Callable[[Config], None], section: str, description: str) -> None:
    """Be a script that checks a config and calls `train`, `finetune` or `reinforce`, with it on every rank.

    Args:
        train: `finetune` or `reinforce`.
        section: The section of the config that `train` needs: ``dataset`` or ``rl``.
        description: What ``--help`` shows.
    """
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=as_written)
    add_config_arguments(parser)
    args = parser.parse_args()
    try:
        config = config_from_arguments(args)
        # Under torchrun, torchrun decides the number of ranks and machines.
        topology = vectorlm.Topology.from_environment()
        world_size = max(args.world_size, topology.world_size)
        check_config(config, world_size, reward_names(), topology.num_nodes)
        if getattr(config, section) is None:
            raise ConfigError(
                f"{args.yaml_path} has no section {section!r}: llama_example_mp.py trains on text (dataset), "
                "rl_example_mp.py on rewards (rl)."
            )
        if section == "rl":
            _check_rl(config)
        found = find_resumption(config, world_size)
        if found is not None and found.is_finished:
            print(say_finished(config, found), file=sys.stderr)
            return
        vectorlm.launch(train, config, world_size=args.world_size)
    except VectorLMError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        print("interrupted; with checkpoints, the same command goes on from the last one", file=sys.stderr)
        sys.exit(130)


def run_help(parser: argparse.ArgumentParser) -> int:
    """Show all commands."""
    parser.print_help()
    return 0


def _positive(text: str) -> float:
    """Read a finite number above 0; argparse names this function's argument where it raises."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a finite number above 0")
    return number


def run_check(args: argparse.Namespace) -> int:
    """Check a config file and say what the run would do."""
    config = config_from_arguments(args)
    check_config(config, args.world_size, reward_names(), args.nnodes)
    if config.rl is not None:
        _check_rl(config)
    asked = args.device_memory_gib
    device_bytes = device_memory_bytes() if asked is None else int(asked * GIB)
    report = memory_report(
        config, args.world_size, device_bytes=device_bytes, ranks_per_node=args.world_size // args.nnodes
    )
    print(f"{args.yaml_path}: ok")
    print(summarise(config, args.world_size, args.nnodes))
    print(report)
    return 0


def _check_rl(config: Config) -> None:
    # This imports torch, which the check of a config for fine-tuning does without.
    from vectorlm.config.check_rl import check_prompt_lengths, check_rl
    from vectorlm.config.check_teacher import check_teacher

    check_rl(config)
    check_prompt_lengths(config)
    check_teacher(config)


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
    from vectorlm.train.load import load_tokenizer

    text = load_text(settings.load_path, from_disk=settings.from_disk, split=settings.split)
    tokenizer, max_seq_len = load_tokenizer(config.model), config.train_parameters.max_seq_len
    dataset = preprocess(text, tokenizer, settings, max_seq_len)
    dataset.save_to_disk(settings.save_path)
    print(f"{settings.save_path}: {len(dataset)} rows of at most {max_seq_len} tokens")
    return 0


def run_sample(args: argparse.Namespace) -> int:
    """Continue prompts with a model, and print the answers."""
    answer(read_request(args, sys.stdin), sys.stdout)
    return 0
