"""``vectorlm new``: create a project with a config, a reward, an environment, and tests for them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from itertools import product
from pathlib import Path

from vectorlm.errors import ConfigError

TEMPLATE = Path(__file__).parent / "project"
WORKFLOW = ".github/workflows/test.yml"


def add_new_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm new``."""
    parser.add_argument("path", metavar="DIR", help="the folder to create")
    parser.add_argument(
        "--repository",
        metavar="URL",
        help=f"the repository from which {WORKFLOW} clones vectorlm",
    )


def new_command(args: argparse.Namespace) -> int:
    """Create the folder and print the command that runs its tests."""
    path = Path(args.path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} must be empty or new. Name another folder.")
    if path.is_dir() and not os.access(path, os.W_OK):
        raise ConfigError(f"{path} must be a folder that you may write to. Name another folder.")
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
        print(f"replace REPOSITORY in {workflow} with the URL of your vectorlm repository", file=sys.stderr)
    print(f"cd {path} && python -m pytest")
    return 0
