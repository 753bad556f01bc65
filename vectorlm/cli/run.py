"""Commands that take a config file: ``vectorlm run``, ``vectorlm check`` and ``vectorlm preprocess``."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import indent

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
from vectorlm.ranks.topology import Topology, has_gpu
from vectorlm.runs.config.load import config_text, load_config
from vectorlm.runs.config.schema import Config
from vectorlm.runs.preflight.accelerate import accelerate_overrides
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.preflight.local_model import missing_files, with_download
from vectorlm.runs.preflight.memory import device_memory_bytes, memory_report
from vectorlm.runs.preflight.memory_plan import GIB
from vectorlm.runs.preflight.summary import summarise


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm run``."""
    add_path_argument(parser)
    add_override_arguments(parser)
    add_memory_argument(parser)
    add_profile_argument(parser)


def run_command(args: argparse.Namespace) -> int:
    """Check the config, then train on every rank: with rewards if it has a section ``rl``, else on text."""
    config = config_from_arguments(args)
    asked = accelerate_overrides(config, os.environ, args.world_size)
    if asked:
        config = load_config(args.yaml_path, [*args.overrides, *asked])
    config = with_download(config)
    from vectorlm.runs.calls import start

    is_main = Topology.from_environment().is_main
    if asked and is_main:
        print(f"from accelerate: {', '.join(asked)}", file=sys.stderr)
    what_was = start(config, args.world_size)
    if is_main:
        end = f"the model is in {Path(config.train_parameters.output_dir, 'final-model')}"
        print(what_was or end, file=sys.stderr)
    return 0


def run_script(section: str, description: str) -> None:
    """Run a script that works like ``vectorlm run``, for one kind of training.

    Args:
        section: The section of the config that the script needs: ``dataset`` or ``rl``.
        description: The text of ``--help``.
    """
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=as_written)
    add_config_arguments(parser)
    args = parser.parse_args()

    def run_section() -> int:
        if getattr(config_from_arguments(args), section) is None:
            raise ConfigError(
                f"{args.yaml_path} needs a section {section!r}: llama_example_mp.py trains on text (dataset), "
                "rl_example_mp.py on rewards (rl). Name another file with --yaml_path."
            )
        return run_command(args)

    sys.exit(exit_code(run_section))


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm check``."""
    parser.add_argument(
        "--device_memory_gib",
        type=_positive,
        metavar="X",
        help="plan for CUDA devices of X GiB (default: the devices of this machine, or its CPU)",
    )
    add_path_argument(parser)
    add_override_arguments(parser)
    add_memory_argument(parser)
    help_text = (
        "start the config's engine twice, and prove that an update does what a start with its weights does"
    )
    parser.add_argument("--fresh_engine", action="store_true", help=help_text)
    help_text = "number of machines, each with the same number of ranks (default 1)"
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help=help_text)


def check_command(args: argparse.Namespace) -> int:
    """Check a config file; print all settings as YAML, and a summary of the run as comments."""
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
    # Without weights, only the memory plan is possible.
    if not missing_files(Path(checked.config.model)):
        # This imports torch and transformers.
        from vectorlm.runs.preflight.dry_run import dry_run

        notes = dry_run(checked.config)
    if args.fresh_engine:
        notes.append(f"updates of the engine: {_compare_engines(checked.config)}")
    summary = summarise(checked, args.world_size, args.nnodes, notes)
    print(config_text(checked.config))
    print(indent(f"{args.yaml_path}: ok\n{summary}\n{report}", "# ", lambda line: True))
    return 0


def _compare_engines(config: Config) -> str:
    if not config.has_engine or config.engine.inference != "vllm":
        raise ConfigError("--fresh_engine needs a config with an engine of vLLM. Leave it out.")
    from vectorlm.sampling.engine import SamplingEngine
    from vectorlm.sampling.verify import verify_updates

    plain = replace(config.engine, engine_args={}, chat=config.chat)
    arguments = config.engine_arguments(has_gpu())
    arguments.pop("data_parallel_size", None)
    if has_gpu() and (arguments.get("tensor_parallel_size") or 1) > 1:
        raise ConfigError(
            "--fresh_engine uses one device. Add --set engine.tensor_parallel_size=1, or leave it out."
        )
    return verify_updates(config.model, lambda folder: SamplingEngine(folder, plain, **arguments))


def _positive(text: str) -> float:
    """Read a finite number above 0."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a finite number above 0")
    return number


def add_preprocess_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm preprocess``."""
    parser.add_argument("yaml_path", metavar="my.yaml", help="the config file")
    add_override_arguments(parser)


def preprocess_command(args: argparse.Namespace) -> int:
    """Tokenise and pack a text dataset, and save it for training."""
    # Only training reads the section 'dataset', which may be incomplete until the datasets exist.
    config = load_config(args.yaml_path, [*args.overrides, "dataset=null"])
    settings = config.dataset_preprocess
    if settings is None:
        raise ConfigError(
            f"{args.yaml_path} needs a section dataset_preprocess, which names the data and the folder. Add it."
        )
    from vectorlm.data.preprocess import preprocess
    from vectorlm.train.load import load_tokenizer

    config = with_download(config)
    # The default handler would not delete the scratch folder.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with at_interrupt(f"{settings.save_path} is unchanged"):
            tokenizer = load_tokenizer(config.model, config.chat)
            summary = preprocess(settings, tokenizer, config.train_parameters.max_seq_len)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"{settings.save_path}:\n{summary}")
    return 0
