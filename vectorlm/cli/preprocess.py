"""``vectorlm preprocess``: from text to the dataset that training reads."""

from __future__ import annotations

import argparse

from vectorlm.config.check_packages import is_installed
from vectorlm.config.load import add_override_arguments, config_from_arguments
from vectorlm.config.local_model import with_download
from vectorlm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm preprocess``."""
    parser.add_argument("yaml_path", metavar="my.yaml", help="the config file")
    add_override_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Tokenise and pack a text dataset, and save it where training will look for it."""
    config = config_from_arguments(args)
    settings = config.dataset_preprocess
    if settings is None:
        raise ConfigError(
            f"{args.yaml_path} has no section dataset_preprocess: it says what to make, and from what."
        )
    if not is_installed("datasets"):
        raise ConfigError("preprocessing needs the package datasets. Run `pip install datasets`.")
    from vectorlm.data.preprocess import load_text, preprocess
    from vectorlm.train.load import load_tokenizer

    config = with_download(config)
    text = load_text(settings.load_path, from_disk=settings.from_disk, split=settings.split)
    tokenizer, max_seq_len = load_tokenizer(config.model), config.train_parameters.max_seq_len
    dataset = preprocess(text, tokenizer, settings, max_seq_len)
    dataset.save_to_disk(settings.save_path)
    print(f"{settings.save_path}: {len(dataset)} rows of at most {max_seq_len} tokens")
    return 0
