"""``vectorlm preprocess``: from text to the dataset that training reads."""

from __future__ import annotations

import argparse
import signal
import sys

from vectorlm.cli import at_interrupt
from vectorlm.cli.arguments import add_override_arguments
from vectorlm.errors import ConfigError
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight.local_model import with_download


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm preprocess``."""
    parser.add_argument("yaml_path", metavar="my.yaml", help="the config file")
    add_override_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Tokenise and pack a text dataset, and save it where training will look for it."""
    # Training alone reads the section 'dataset', which may be incomplete until the datasets are made.
    config = load_config(args.yaml_path, [*args.overrides, "dataset=null"])
    settings = config.dataset_preprocess
    if settings is None:
        raise ConfigError(
            f"{args.yaml_path} has no section dataset_preprocess: it says what to make, and from what."
        )
    from vectorlm.data.preprocess import preprocess
    from vectorlm.train.load import load_tokenizer

    config = with_download(config)
    # Its default would leave the scratch folder behind.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with at_interrupt(f"{settings.save_path} is as it was before"):
            summary = preprocess(settings, load_tokenizer(config.model), config.train_parameters.max_seq_len)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"{settings.save_path}:\n{summary}")
    return 0
