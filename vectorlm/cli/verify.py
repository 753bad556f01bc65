"""``vectorlm verify``: whether a running vLLM server holds a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from vectorlm.cli.export import find_source, load_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm verify``."""
    parser.add_argument(
        "address", metavar="ADDRESS", help="of a vLLM server, for example http://127.0.0.1:8000"
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a model's folder, LoRA adapters that it was merged with, a run's folder or one of its checkpoints",
    )


def run(args: argparse.Namespace) -> int:
    """Compare the server's weights with the checkpoint's, and print how it was proven that they are the same."""
    source = find_source(Path(args.checkpoint))
    url = args.address if "://" in args.address else f"http://{args.address}"
    # This imports torch, which a wrong path is told without.
    from vectorlm.sampling.verify import verify_server

    proof = verify_server(url, lambda: load_source(source, merges=True)[0])
    print(f"{url} and {source.path}: {proof}.")
    return 0
