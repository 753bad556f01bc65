"""``vectorlm new``: a folder to begin from, with a config, a reward, an environment, and tests of them."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from itertools import product
from pathlib import Path

from vectorlm.errors import ConfigError

TEMPLATE = Path(__file__).parent / "project"
WORKFLOW = ".github/workflows/test.yml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm new``."""
    parser.add_argument("path", metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--repository",
        metavar="URL",
        help=f"where {WORKFLOW} clones vectorlm from; without it, write it there",
    )


def run(args: argparse.Namespace) -> int:
    """Make the folder and print what to do in it."""
    path = Path(args.path)
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty. Name a new folder.")
    shutil.copytree(TEMPLATE, path, dirs_exist_ok=True)
    for module in path.glob("*.py.in"):
        module.rename(module.with_suffix(""))
    with open(path / "prompts.jsonl", "w", encoding="utf-8") as file:
        for a, b in product(range(1, 10), repeat=2):
            prompt = [{"role": "user", "content": f"{a} + {b} = ? Answer with the number only."}]
            print(json.dumps({"prompt": prompt, "answer": a + b}), file=file)
    workflow = path / WORKFLOW
    if args.repository:
        workflow.write_text(workflow.read_text().replace("REPOSITORY", args.repository))
    else:
        print(f"write where vectorlm is cloned from into {workflow}, in place of REPOSITORY", file=sys.stderr)
    print(f"cd {path} && python -m pytest")
    return 0
